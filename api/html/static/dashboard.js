// Swaps regions of a page instead of loading it again, and follows the event stream.
// Every state is in the URL: without this script the same links and forms load whole pages.
"use strict";

const REFRESH_MS = 300; // at most one refresh in this time while events arrive
const MOST_WAIT_MS = 15000; // between tries after a refresh failed
const FIELDS = "input:not([type=checkbox]):not([type=radio]):not([type=hidden]), textarea, select";
const FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex]";

const regions = (root) => new Map([...root.querySelectorAll("[data-region]")].map((e) => [e.id, e]));
const asLoaded = new WeakMap(); // by region: its markup as the service sent it
// The form token differs each time, and each one is valid as long as the session.
const markupOf = (region) => region.outerHTML.replace(/(name="csrf_token" value=")[^"]*/g, "$1");
let loading = null; // the request of the reader that is under way
let at = location.href; // the address of what is shown

/** Loads a page that the reader asked for, and replaces those regions of this one that differ. */
async function swap(address, { push = false } = {}) {
  loading?.abort();
  const mine = (loading = new AbortController());
  const main = document.querySelector("main");
  main.setAttribute("aria-busy", "true");
  try {
    const answer = await fetched(address, mine.signal);
    if (answer === null) return;
    if (answer.problem) return say(answer.problem);
    if (push) history.pushState(null, "", answer.url);
    at = location.href;
    replace(answer.page, { quiet: false });
  } catch (error) {
    if (error.name !== "AbortError") say(`This page could not be loaded: ${error.message}`);
  } finally {
    if (loading === mine) {
      loading = null;
      main.removeAttribute("aria-busy");
      if (stale) refresh();
    }
  }
}

/** The page at an address; null: the browser goes there, since it is another page. */
async function fetched(address, signal) {
  const answer = await fetch(address, { headers: { Accept: "text/html" }, signal });
  const moved = new URL(answer.url).pathname !== new URL(address, location.href).pathname;
  if (moved || answer.status === 401) {
    location.assign(moved ? answer.url : location.href); // the session has ended, or a redirect
    return null;
  }
  if (!(answer.headers.get("content-type") ?? "").startsWith("text/html")) {
    throw new Error(`the service answered ${answer.status}`);
  }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const problem = answer.ok ? "" : (page.querySelector("[data-problem]")?.textContent ?? "");
  if (!answer.ok && !problem) throw new Error(`the service answered ${answer.status}`);
  return { page, problem, status: answer.status, url: answer.url };
}

function replace(page, { quiet }) {
  document.title = page.title;
  const fresh = regions(page);
  for (const [id, old] of regions(document)) {
    const next = fresh.get(id);
    if (!next) continue;
    // What was said about an action stays until the reader asks for another page.
    if (quiet && (id === "messages" || isEdited(old))) continue;
    const markup = markupOf(next);
    if (markup === asLoaded.get(old) && (quiet || !isEdited(old)) && id !== "messages") continue;
    const focused = placeOfFocus(old);
    if (quiet) {
      keepChoices(old, next);
      markChanges(old, next); // not where the reader asked for other rows: all of them differ
    }
    const adopted = document.adoptNode(next);
    old.replaceWith(adopted);
    asLoaded.set(adopted, markup);
    if (focused) adopted.querySelectorAll(FOCUSABLE)[focused(adopted)]?.focus({ preventScroll: true });
  }
  dates();
  copyButtons();
  document.dispatchEvent(new CustomEvent("page-swapped"));
}

/** Whether the reader has typed or chosen something that was not sent. */
const isEdited = (region) =>
  [...region.querySelectorAll(FIELDS)].some((field) =>
    field.matches("select")
      ? [...field.options].some((o) => o.selected !== o.defaultSelected) &&
        [...field.options].some((o) => o.defaultSelected)
      : field.value !== field.defaultValue,
  ) || (region.contains(document.activeElement) && document.activeElement.matches(FIELDS));

/** Where the focus is inside of a region: finds the same element in the region's next version. */
function placeOfFocus(region) {
  const focused = document.activeElement;
  if (!region.contains(focused)) return null;
  const number = [...region.querySelectorAll(FOCUSABLE)].indexOf(focused);
  const key = (e) => e.id || `${e.closest("[data-row]")?.dataset.row} ${e.name} ${e.textContent}`;
  const wanted = key(focused);
  return (next) => {
    const same = [...next.querySelectorAll(FOCUSABLE)].findIndex((e) => key(e) === wanted);
    return same >= 0 ? same : number;
  };
}

/** Ticked boxes, opened details and scrolled tables stay as they are when events come. */
function keepChoices(old, next) {
  for (const box of old.querySelectorAll("input[type=checkbox], input[type=radio]")) {
    const same = `input[name="${CSS.escape(box.name)}"][value="${CSS.escape(box.value)}"]`;
    const other = next.querySelector(same);
    if (other) other.checked = box.checked;
  }
  for (const details of old.querySelectorAll("details[id]")) {
    const other = next.querySelector(`#${CSS.escape(details.id)}`);
    if (other) other.open = details.open;
  }
  const scrolled = [...old.querySelectorAll(".wide")].map((e) => e.scrollLeft);
  queueMicrotask(() =>
    next.querySelectorAll(".wide").forEach((e, place) => (e.scrollLeft = scrolled[place] ?? 0)),
  );
}

/** Marks rows that are new or differ, so that the style can show them. */
function markChanges(old, next) {
  const was = new DOMParser().parseFromString(asLoaded.get(old) ?? "", "text/html");
  const said = (row) => row.dataset.state ?? row.textContent;
  const before = new Map([...was.querySelectorAll("[data-row]")].map((r) => [r.dataset.row, said(r)]));
  for (const row of next.querySelectorAll("[data-row]")) {
    if (before.size && before.get(row.dataset.row) !== said(row)) row.classList.add("changed");
  }
}

function say(words) {
  const line = document.createElement("p");
  line.className = "problem";
  line.textContent = words;
  const messages = document.getElementById("messages");
  messages.replaceChildren(line);
  messages.scrollIntoView({ block: "nearest" });
}

/** Shows times in the reader's time zone; the page has them in UTC. */
function dates() {
  for (const time of document.querySelectorAll("time[datetime]:not([title])")) {
    time.title = time.textContent;
    time.textContent = new Date(time.dateTime).toLocaleString("sv"); // 2026-01-31 13:05:09
  }
}

/** A button for each command and file that copies it; browsers allow that at safe addresses only. */
function copyButtons() {
  for (const text of navigator.clipboard ? document.querySelectorAll("pre:not([data-copies])") : []) {
    text.dataset.copies = "";
    const button = document.createElement("button");
    [button.type, button.className, button.textContent] = ["button", "copy", "Copy"];
    button.onclick = async () => {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    };
    text.before(button);
  }
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-swap]");
  if (!link || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey) return;
  if (new URL(link.href).pathname !== location.pathname) return; // another page has other regions
  event.preventDefault();
  swap(link.href, { push: true });
});

document.addEventListener("submit", (event) => {
  const form = event.target;
  const question = event.submitter?.dataset.confirm;
  if (question && !form.dataset.confirmed) {
    event.preventDefault();
    ask(question, event.submitter, () => {
      form.dataset.confirmed = "yes";
      form.requestSubmit(event.submitter);
    });
    return;
  }
  delete form.dataset.confirmed;
  if (form.matches("form[data-swap]")) {
    event.preventDefault();
    const given = new URLSearchParams();
    for (const [name, value] of new FormData(form, event.submitter)) {
      if (value !== "") given.append(name, value);
    }
    swap(`${form.getAttribute("action").split("?")[0]}?${given}`, { push: true });
  } else if (form.method === "post") {
    leave();
    // A second press must not send the form twice.
    setTimeout(() => {
      for (const button of form.querySelectorAll("button:enabled")) {
        button.disabled = true;
        button.dataset.sent = "";
      }
    });
  }
});

addEventListener("pageshow", (event) => {
  // After "back" the browser may show this page as it was left.
  if (!event.persisted) return;
  document.querySelectorAll("button[data-sent]").forEach((b) => (b.disabled = false));
});

document.addEventListener("change", (event) => {
  const form = event.target.form;
  if (form?.matches("form[data-swap]") && !event.target.matches("[type=text], [type=search], [type=number]")) {
    form.requestSubmit();
  }
});

const dialog = document.getElementById("ask");
const [back, confirmed] = dialog.querySelectorAll("button");
back.addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => stale && refresh());

function ask(question, button, then) {
  dialog.querySelector("p").textContent = question;
  confirmed.textContent = button.textContent.trim();
  confirmed.onclick = () => (dialog.close(), then());
  dialog.showModal();
}

addEventListener("popstate", () => {
  // A jump within the page also comes here; it needs nothing from the service.
  if (location.href.split("#")[0] !== at.split("#")[0]) swap(location.href);
  at = location.href;
});

/** Loads the values of a filter when it is opened: the page of a long leaderboard has none. */
document.addEventListener(
  "toggle",
  async ({ target }) => {
    const link = target.open && target.querySelector("a[data-fill]");
    if (!link) return;
    try {
      const answer = await fetched(link.href);
      const values = answer?.page.querySelector(`#${CSS.escape(target.id)} fieldset`);
      const old = link.closest("fieldset");
      const hasFocus = old.contains(document.activeElement);
      if (!values || !old.isConnected) return;
      old.replaceWith(values);
      if (hasFocus) values.querySelector(FOCUSABLE)?.focus({ preventScroll: true });
    } catch {
      // The link is still there.
    }
  },
  true,
);

// The event stream.

const prefix = document.querySelector("meta[name=prefix]").content;
const follows = (document.body.dataset.follows ?? "").split(" ").filter(Boolean);
// "campaigns" (every event), or the ids of campaigns
let stream = ""; // "live" or "lost"
let stale = false; // whether events came that the page does not show yet
let due = null; // the timer of the next refresh
let refreshed = 0; // when the last refresh began
let wait = 1000;
let leaving = false; // whether the browser is on its way to another page

function refresh() {
  stale = true;
  // Each of them refreshes at its end. A refresh would replace the button that opened a dialog.
  if (due !== null || document.hidden || loading || leaving || dialog.open) return;
  due = setTimeout(load, Math.max(0, refreshed + REFRESH_MS - Date.now()));
}

/** Loads this page again for what events told; the timer `due` stands until it is done. */
async function load() {
  stale = false;
  refreshed = Date.now();
  const address = location.href;
  try {
    const answer = await fetched(address);
    if (answer === null || leaving) return;
    if (answer.status >= 500) throw new Error(answer.problem);
    if (answer.problem) return location.reload(); // it was deleted, or may not be seen any more
    if (dialog.open) stale = true;
    else if (!loading && address === location.href) replace(answer.page, { quiet: true });
    wait = 1000;
    show(stream);
  } catch {
    if (leaving) return;
    show("lost");
    stale = true;
    refreshed = Date.now() + wait - REFRESH_MS;
    wait = Math.min(2 * wait, MOST_WAIT_MS);
  } finally {
    due = null;
    if (stale) refresh();
  }
}

function leave() {
  leaving = true; // a refresh would cancel the form or the link that the reader has chosen
  setTimeout(() => (leaving = false), 5000); // it was a download
}

addEventListener("beforeunload", leave);

function show(state) {
  const shown = document.getElementById("connection");
  if (!shown || !state) return;
  const words = { live: "live", lost: "connection lost; trying again" }[state];
  if (shown.textContent !== words) shown.textContent = words;
  shown.className = `connection ${state}`;
}

const concerns = (event) =>
  follows.includes("campaigns") ||
  event.campaign_id == null || // a worker or nodes: the reason why a campaign waits may change
  follows.includes(String(event.campaign_id));

function take({ kind, event }) {
  if (kind === "stream.lost") show((stream = "lost"));
  else if (kind === "stream.opened") {
    const [opened, returned] = [stream === "", stream === "lost"];
    show((stream = "live"));
    if (event.missed || returned) renew({ kind, event });
    else if (opened) refresh(); // events may have come since the page was made
  } else if (concerns(event)) renew({ kind, event });
}

function renew(detail) {
  document.dispatchEvent(new CustomEvent("service-event", { detail }));
  refresh();
}

function follow() {
  const asked = {
    stream: `${prefix}/v1/events`,
    kinds: document.body.dataset.kinds.split(" "),
  };
  // One stream for all tabs: browsers open six connections to a host at most. Where there are no
  // shared workers, each tab has a stream of its own.
  const script = document.body.dataset.stream;
  const worker = window.SharedWorker ? new SharedWorker(script, { name: prefix }) : new Worker(script);
  const port = worker.port ?? worker;
  port.onmessage = (message) => take(message.data);
  port.postMessage(asked);
  worker.onerror = () => show((stream = "lost"));
  addEventListener("pagehide", () => port.postMessage({ leaves: true }));
  addEventListener("pageshow", (event) => {
    if (!event.persisted) return;
    port.postMessage(asked); // the browser kept this page while events came
    refresh();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && stale) refresh();
  });
}

// A campaign was submitted, or its person signs out: the form starts empty again.
const forgetDrafts = () =>
  Object.keys(sessionStorage).forEach((key) => key.startsWith("draft ") && sessionStorage.removeItem(key));
if (location.pathname.startsWith(`${prefix}/campaigns/`) && document.referrer.split("?")[0].endsWith("/submit")) {
  if (sessionStorage.getItem("submitted")) forgetDrafts();
  sessionStorage.removeItem("submitted");
}
document.querySelector("form[action$='/sign-out']")?.addEventListener("submit", forgetDrafts);

for (const region of regions(document).values()) asLoaded.set(region, markupOf(region));
dates();
copyButtons();
if (follows.length) follow();
