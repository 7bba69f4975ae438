// Swaps regions of a page instead of loading it again, and follows the event stream.
// Every state is in the URL: without this script the same links and forms load whole pages.
"use strict";

const REFRESH_MS = 300; // at most this often while events arrive
const regions = (root) => new Map([...root.querySelectorAll("[data-region]")].map((e) => [e.id, e]));
let loading = null; // the request that is under way

/** Loads a page and replaces those regions of this one that differ. */
async function swap(address, { push = false, quiet = false } = {}) {
  loading?.abort();
  const mine = (loading = new AbortController());
  const main = document.querySelector("main");
  if (!quiet) main.setAttribute("aria-busy", "true");
  try {
    const answer = await fetch(address, {
      headers: { Accept: "text/html" },
      signal: mine.signal,
    });
    if (!(answer.headers.get("content-type") ?? "").startsWith("text/html")) {
      throw new Error(`the service answered ${answer.status}`);
    }
    if (answer.redirected && new URL(answer.url).pathname !== new URL(address, location.href).pathname) {
      location.assign(answer.url); // the session has ended, or the page has moved
      return;
    }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (push) history.pushState(null, "", answer.url);
    replace(page);
    document.dispatchEvent(new CustomEvent("page-swapped"));
  } catch (error) {
    if (error.name === "AbortError") return;
    if (quiet) throw error;
    say(`This page could not be loaded: ${error.message}`);
  } finally {
    if (loading === mine) {
      loading = null;
      main.removeAttribute("aria-busy");
    }
  }
}

function replace(page) {
  document.title = page.title;
  const focused = document.activeElement?.id;
  const open = new Set([...document.querySelectorAll("details[open][id]")].map((e) => e.id));
  const fresh = regions(page);
  for (const [id, old] of regions(document)) {
    const next = fresh.get(id);
    if (!next || next.outerHTML === old.dataset.asLoaded) continue;
    if (old.contains(document.activeElement) && isTyping(document.activeElement)) continue;
    const asLoaded = next.outerHTML;
    markChanges(old, next);
    const adopted = document.adoptNode(next);
    old.replaceWith(adopted);
    adopted.dataset.asLoaded = asLoaded;
  }
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  dates();
}

/** Marks rows that are new or differ, so that the style can show them. */
function markChanges(old, next) {
  const before = new Map([...old.querySelectorAll("tr[data-row]")].map((r) => [r.dataset.row, r]));
  for (const row of next.querySelectorAll("tr[data-row]")) {
    const was = before.get(row.dataset.row);
    if (before.size && was?.textContent !== row.textContent) row.classList.add("changed");
  }
}

const isTyping = (e) => e.matches("input:not([type=checkbox]):not([type=radio]), textarea, select");

function say(words) {
  const line = document.createElement("p");
  line.className = "problem";
  line.textContent = words;
  document.getElementById("messages").replaceChildren(line);
}

/** Shows times in the reader's time zone; the page has them in UTC. */
function dates() {
  for (const time of document.querySelectorAll("time[datetime]:not([title])")) {
    time.title = time.textContent;
    time.textContent = new Date(time.dateTime).toLocaleString(undefined, {
      dateStyle: "medium",
      timeStyle: "short",
    });
  }
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-swap]");
  if (link && event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey) {
    event.preventDefault();
    swap(link.href, { push: true });
  }
});

document.addEventListener("submit", (event) => {
  const form = event.target;
  const question = event.submitter?.dataset.confirm;
  if (question && !form.dataset.confirmed) {
    event.preventDefault();
    ask(question, () => {
      form.dataset.confirmed = "yes";
      form.requestSubmit(event.submitter);
    });
    return;
  }
  delete form.dataset.confirmed;
  if (form.matches("form[data-swap]")) {
    event.preventDefault();
    const given = new URLSearchParams();
    for (const [name, value] of new FormData(form)) if (value !== "") given.append(name, value);
    swap(`${form.action.split("?")[0]}?${given}`, { push: true });
  } else if (form.method === "post") {
    // A second press must not send the form twice.
    setTimeout(() => form.querySelectorAll("button").forEach((b) => (b.disabled = true)));
  }
});

document.addEventListener("change", (event) => {
  const form = event.target.closest("form[data-swap]");
  if (form && !event.target.matches("[type=text], [type=search], [type=number]")) form.requestSubmit();
});

function ask(question, then) {
  const dialog = document.createElement("dialog");
  const words = document.createElement("p");
  words.textContent = question;
  const no = document.createElement("button");
  no.textContent = "Back";
  const yes = document.createElement("button");
  yes.className = "danger";
  yes.textContent = "Yes";
  const row = document.createElement("div");
  row.className = "actions";
  row.append(no, yes);
  dialog.append(words, row);
  document.body.append(dialog);
  no.addEventListener("click", () => dialog.close());
  yes.addEventListener("click", () => (dialog.close(), then()));
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}

addEventListener("popstate", () => swap(location.href));

// The event stream.

const prefix = document.querySelector("meta[name=prefix]").content;
const follows = document.body.dataset.follows; // "campaigns", or the ids of campaigns
let due = null;

function refresh() {
  if (due !== null) return;
  due = setTimeout(async () => {
    due = null;
    if (document.hidden) return;
    try {
      await swap(location.href, { quiet: true });
      show("live");
    } catch {
      show("lost");
      setTimeout(refresh, 1000);
    }
  }, REFRESH_MS);
}

function show(state) {
  const shown = document.getElementById("connection");
  if (!shown) return;
  const words = { live: "live", lost: "connection lost; trying again" }[state];
  if (shown.textContent !== words) shown.textContent = words;
  shown.className = `connection ${state}`;
}

const concerns = (event) =>
  follows === "campaigns" ||
  event.campaign_id === undefined ||
  follows.split(" ").includes(String(event.campaign_id));

function take({ kind, event }) {
  if (kind === "stream.lost") show("lost");
  else if (kind === "stream.opened") {
    show("live");
    if (event.missed || event.reopened) refresh();
  } else if (concerns(event)) {
    document.dispatchEvent(new CustomEvent("service-event", { detail: { kind, event } }));
    refresh();
  }
}

if (follows) {
  if (window.SharedWorker) {
    // One stream for all tabs: browsers open six connections to a host at most.
    const worker = new SharedWorker(document.body.dataset.stream, { name: prefix });
    worker.port.onmessage = (message) => take(message.data);
    worker.port.postMessage({
      stream: `${prefix}/v1/events`,
      kinds: document.body.dataset.kinds.split(" "),
    });
    worker.onerror = () => show("lost");
  }
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) refresh();
  });
}

dates();
