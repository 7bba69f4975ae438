// A worker with the event stream of this service: shared by all tabs, or one for each tab.
"use strict";

const FIRST_WAIT_MS = 500;
const MOST_WAIT_MS = 5000;
const LONG_MS = 60000; // a stream that lasted longer has ended by its age
const ports = new Set();
let kinds = [];
let address = "";
let source = null;
let timer = null; // set while the stream is closed and will be opened again
let last = null; // number of the last event
let wait = FIRST_WAIT_MS;
let isLive = false;
let since = 0; // when the stream was opened

const tell = (message) => ports.forEach((port) => port.postMessage(message));

function open() {
  timer = null;
  source = new EventSource(last === null ? address : `${address}?after=${last}`);
  source.addEventListener("stream.opened", (event) => {
    wait = FIRST_WAIT_MS;
    last = event.lastEventId || last;
    const missed = JSON.parse(event.data).missed || (since && Date.now() - since > LONG_MS);
    // The end of a stream after an hour is no loss: the next one goes on after the last event. But
    // events without a number may have come in between.
    if (!isLive || missed) tell({ kind: "stream.opened", event: { missed } });
    isLive = true;
    since = Date.now();
  });
  source.addEventListener("stream.closed", () => again());
  for (const kind of kinds) {
    source.addEventListener(kind, (event) => {
      last = event.lastEventId || last;
      tell({ kind, event: JSON.parse(event.data) });
    });
  }
  // After an HTTP error the browser does not open the stream again by itself.
  source.onerror = () => {
    if (timer !== null) return; // the service has closed it
    isLive = false;
    tell({ kind: "stream.lost" });
    again();
  };
}

function again() {
  source.close();
  if (timer !== null) return;
  timer = setTimeout(open, wait);
  wait = Math.min(2 * wait, MOST_WAIT_MS);
}

function serve(port) {
  port.onmessage = ({ data }) => {
    if (data.leaves) {
      ports.delete(port);
      return;
    }
    ports.add(port);
    if (source === null) {
      ({ kinds, stream: address } = data);
      open();
    } else if (isLive) port.postMessage({ kind: "stream.opened", event: { missed: false } });
    else if (timer !== null) port.postMessage({ kind: "stream.lost" });
  };
}

if ("onconnect" in self) self.onconnect = ({ ports: [port] }) => serve(port);
else serve(self);
