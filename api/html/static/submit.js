// Checks a campaign while its form is filled in, and keeps what was typed in this tab until the
// campaign is submitted. Without this script the button "Check" does the former.
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
    const hasEnded = answer.status === 401 || new URL(answer.url).pathname.endsWith("/sign-in");
    if (hasEnded) return tell(box, sentence("ended"));
    if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    box.replaceWith(document.adoptNode(page.getElementById("check")));
    mark(JSON.parse(document.getElementById("check").dataset.errors));
  } catch (error) {
    if (error.name === "AbortError") return;
    const why = error instanceof TypeError ? "the service does not answer" : error.message;
    const line = sentence("unchecked");
    line.append(` ${why}. What you typed is kept in this tab.`);
    tell(box, line);
  }
}

/** A sentence of the page that is not shown at first. */
const sentence = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);

/** Replaces the check by a sentence. */
function tell(box, line) {
  box.replaceChildren(line);
  box.removeAttribute("aria-busy");
}

/** Shows each error below its field. */
function mark(errors) {
  for (const place of campaign.querySelectorAll("[data-errors-of]")) {
    const name = place.dataset.errorsOf;
    const words = (errors[name] ?? []).join("; ");
    if (place.textContent !== words) place.textContent = words;
    const field = document.getElementById(`f-${name.replaceAll(".", "-")}`);
    if (field.matches("fieldset")) continue; // the error stands below its boxes
    if (words) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}

// What was typed, by person and address: sent forms and ended sessions lead to other pages, and the
// browser does not bring it back.
const place = `draft ${document.querySelector(".holder")?.textContent.trim()} ${location.pathname}`;
const draft = `${place}${location.search}`;

function keep() {
  const typed = [...new FormData(campaign)].filter(([name]) => !["csrf_token", "key"].includes(name));
  sessionStorage.setItem(draft, JSON.stringify(typed));
}

/** Fills in what was typed here before; returns whether it differs from what the service sent. */
function restore() {
  const kept = sessionStorage.getItem(draft);
  if (kept === null) return false;
  const typed = JSON.parse(kept);
  const view = typed.find(([name]) => name === "view")[1];
  if (view !== campaign.elements.view.value) {
    sessionStorage.setItem(`${place}?view=${view}`, kept);
    sessionStorage.removeItem(draft);
    location.replace(`?view=${view}`);
    return false;
  }
  const before = JSON.stringify([...new FormData(campaign)]);
  const nth = {};
  for (const field of campaign.elements) {
    const values = typed.filter(([name]) => name === field.name).map(([, value]) => value);
    if (field.type === "checkbox") field.checked = values.includes(field.value);
    else if (field.matches("[type=text], select, textarea")) {
      const value = values[(nth[field.name] = (nth[field.name] ?? -1) + 1)] ?? "";
      const lacks = field.matches("select") && ![...field.options].some((o) => o.value === value);
      if (lacks) field.add(new Option(value, value));
      field.value = value;
    }
  }
  return JSON.stringify([...new FormData(campaign)]) !== before;
}

campaign.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(check, TYPING_MS);
  keep();
});
campaign.addEventListener("submit", (event) => {
  clearTimeout(timer);
  keep();
  if (event.submitter?.value === "submit") sessionStorage.setItem("submitted", "yes");
});

{
  const [visit] = performance.getEntriesByType("navigation");
  const isReturn = ["back_forward", "reload"].includes(visit?.type);
  sessionStorage.removeItem("submitted");
  if (!("restores" in campaign.dataset || isReturn)) keep(); // the answer to a form has its fields
  else if (restore()) {
    const line = sentence("restored");
    line.querySelector("button").onclick = () => {
      sessionStorage.removeItem(draft);
      location.reload();
    };
    document.getElementById("messages").replaceChildren(line);
    check();
  }
}
