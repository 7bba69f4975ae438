// Signs in with the code in the fragment of the address, which no server and no log receives.
"use strict";

{
  const form = document.getElementById("sign-in");
  const words = document.getElementById("code-words");
  const button = document.getElementById("use-code");

  async function signIn(code) {
    button.disabled = true;
    words.hidden = false;
    let problem = "the service does not answer";
    try {
      const answer = await fetch(form.action, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ code, next: form.dataset.next }),
      });
      const told = await answer.json();
      if (answer.ok) {
        location.replace(told.next);
        return;
      }
      problem = told.detail;
    } catch {
      // The problem is as above.
    }
    words.textContent = `The code of this address does not sign in: ${problem}.`;
    button.hidden = true;
    form.elements.secret.focus();
  }

  function begin() {
    const code = new URLSearchParams(location.hash.slice(1)).get("code");
    if (!code) return;
    // Neither the history nor a bookmark keeps the code.
    history.replaceState(null, "", location.pathname + location.search);
    document.getElementById("with-code").hidden = false;
    if ("atOnce" in form.dataset) {
      signIn(code);
      return;
    }
    words.hidden = true;
    button.hidden = false;
    button.onclick = () => signIn(code);
  }

  begin();
  addEventListener("hashchange", begin); // another address in the same tab
}
