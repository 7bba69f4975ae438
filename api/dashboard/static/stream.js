// A shared worker: one event stream for all tabs of this service.
"use strict";

const KINDS_OF_STREAM = ["stream.opened", "stream.closed"];
const MOST_WAIT_MS = 15000;
const ports = new Set();
let source = null;
let last = null; // number of the last event
let wait = 500;
let opened = false;

const tell = (message) => ports.forEach((port) => port.postMessage(message));

function open(address) {
  source = new EventSource(last === null ? address : `${address}?after=${last}`);
  const take = (event) => {
    if (event.lastEventId) last = event.lastEventId;
    if (event.type === "stream.opened") {
      wait = 500;
      const about = { ...JSON.parse(event.data), reopened: opened };
      opened = true;
      tell({ kind: event.type, event: about });
    } else if (event.type === "stream.closed") again(address);
    else tell({ kind: event.type, event: JSON.parse(event.data) });
  };
  for (const kind of [...KINDS_OF_STREAM, ...kinds]) source.addEventListener(kind, take);
  // After an HTTP error the browser does not open the stream again by itself.
  source.onerror = () => again(address);
}

function again(address) {
  source.close();
  tell({ kind: "stream.lost" });
  setTimeout(open, wait, address);
  wait = Math.min(2 * wait, MOST_WAIT_MS);
}

let kinds = [];
self.onconnect = ({ ports: [port] }) => {
  ports.add(port);
  port.onmessage = ({ data }) => {
    if (source === null) {
      kinds = data.kinds;
      open(data.stream);
    } else if (opened && source.readyState === EventSource.OPEN) {
      port.postMessage({ kind: "stream.opened", event: { missed: false, reopened: false } });
    }
  };
};
