// Checks a campaign while its form is filled in. Without this script the button "Check" does it.
"use strict";

const TYPING_MS = 400; // a check begins when nothing was typed for this long
const campaign = document.getElementById("campaign-form");
let asked = null; // the check that is under way
let timer = null;

async function check() {
  asked?.abort();
  const mine = (asked = new AbortController());
  const box = document.getElementById("check");
  box.setAttribute("aria-busy", "true");
  try {
    const answer = await fetch(campaign.dataset.check, {
      method: "POST",
      body: new URLSearchParams(new FormData(campaign)),
      headers: {
        Accept: "text/html",
        "X-CSRF-Token": document.querySelector("meta[name=csrf-token]").content,
      },
      signal: mine.signal,
    });
    if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    box.replaceWith(document.adoptNode(page.getElementById("check")));
    mark(JSON.parse(document.getElementById("check").dataset.errors));
  } catch (error) {
    if (error.name === "AbortError") return;
    const line = document.createElement("p");
    line.className = "problem";
    line.textContent = `The campaign could not be checked: ${error.message}`;
    box.replaceChildren(line);
    box.removeAttribute("aria-busy");
  }
}

/** Shows each error below its field. */
function mark(errors) {
  for (const place of campaign.querySelectorAll("[data-errors-of]")) {
    const name = place.dataset.errorsOf;
    const words = (errors[name] ?? []).join("; ");
    if (place.textContent !== words) place.textContent = words;
    const field = campaign.elements[name];
    if (words) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}

campaign.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(check, TYPING_MS);
});
campaign.addEventListener("submit", () => clearTimeout(timer));
