"use strict";
// All text from the store is written with textContent, and elements are never built from text.

const byId = (id) => document.getElementById(id);
const mayBreak = document.documentElement.dataset.mayBreak === "yes";
const store = document.documentElement.dataset.store;

const locks = new Map();
let graph = { waits: [], omitted: 0, is_complete: true, deadlocks: [] };
let numbers = null;
// The difference between the clocks of this browser and of the server. It is the minimum over all
// events, because the delay of an event increases the measured difference.
let clockOffset = Infinity;
let sort = { by: "key", descending: false };
let rowLimit = 200;
let selected = null;

const serverNow = () => Date.now() - (Number.isFinite(clockOffset) ? clockOffset : 0);

// Invisible characters, and characters that change the direction of the text.
const HIDDEN = new RegExp("[\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u115f\\u1160\\u180e\\u200b-\\u200f"
  + "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\u{e0000}-\\u{e0fff}]", "gu");
const ESCAPES = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

// Quotes and escapes a text that contains hidden characters, as the commands of `lockreg` do.
function printable(text) {
  if (text !== "" && text.trim() === text && text.search(HIDDEN) === -1) return text;
  const escaped = text.replace(/["\\]/g, "\\$&")
    .replace(HIDDEN, (c) => ESCAPES[c] || "\\u{" + c.codePointAt(0).toString(16) + "}");
  return "\"" + escaped + "\"";
}

function shortened(text, length) {
  const characters = Array.from(printable(text));
  return characters.length > length ? characters.slice(0, length - 1).join("") + "\u2026" : characters.join("");
}

function formatDuration(ms) {
  const s = Math.floor(Math.max(0, ms) / 1000);
  const parts = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];
  const first = Math.max(0, parts.findIndex(([size]) => s >= size));
  const texts = parts.slice(first, first + 2).map(([size, unit], index) =>
    (index === 0 ? Math.floor(s / size) : Math.floor(s % parts[first][0] / size)) + unit);
  return s === 0 ? "0s" : texts.filter((text, index) => index === 0 || !/^0/.test(text)).join(" ");
}

function element(name, text, className) {
  const created = document.createElement(name);
  if (text !== undefined) created.textContent = text;
  if (className) created.className = className;
  return created;
}

const textOf = (text) => element("span", printable(text), "text");
const labelOf = (label) => label === null ? element("span", "no label", "weak") : textOf(label);

// Replaces the children of `parent` that differ. Equal children stay, so that they keep the
// selection of text.
function fill(parent, children) {
  children.forEach((child, index) => {
    const old = parent.children[index];
    if (!old) parent.append(child);
    else if (!old.isEqualNode(child)) old.replaceWith(child);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

// The table

function* shownRows(filter) {
  const contains = (text) => text !== null && text.toLowerCase().includes(filter);
  for (const lock of locks.values()) {
    const waiters = lock.waiters || [];
    const isShown = contains(lock.key) || waiters.some((waiter) => contains(waiter.label));
    for (const holder of lock.holders || [null]) {
      if (isShown || (holder && contains(holder.label))) yield { key: lock.key, holder, waiters: waiters.length };
    }
  }
}

const compareText = (a, b) => a < b ? -1 : a > b ? 1 : 0;
const compareKeys = (a, b) => compareText(a.key, b.key);
const timeOf = (row, name) => (row.holder && row.holder[name]) || Infinity;
const ORDERS = {
  key: compareKeys,
  label: (a, b) => compareText((a.holder && a.holder.label) || "", (b.holder && b.holder.label) || ""),
  since: (a, b) => timeOf(b, "since") - timeOf(a, "since") || 0,
  ends: (a, b) => timeOf(a, "ends") - timeOf(b, "ends") || 0,
  waiters: (a, b) => a.waiters - b.waiters,
};
// The first click on these columns shows the largest values first.
const LARGEST_FIRST = ["since", "waiters"];

const tableBody = document.querySelector("#locks tbody");

function newRow() {
  const row = element("tr");
  for (let column = 0; column < 7; column++) row.append(element("td"));
  const button = element("button", "", "text");
  button.type = "button";
  button.addEventListener("click", () => select(row.lockKey));
  row.firstElementChild.append(button);
  row.children[2].className = "text";
  return row;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function drawTable() {
  const rows = Array.from(shownRows(byId("filter").value.toLowerCase()));
  const order = ORDERS[sort.by];
  rows.sort((a, b) => (sort.descending ? order(b, a) : order(a, b)) || compareKeys(a, b));
  const count = Math.min(rows.length, rowLimit);
  while (tableBody.children.length < count) tableBody.append(newRow());
  while (tableBody.children.length > count) tableBody.lastElementChild.remove();
  const now = serverNow();
  for (let index = 0; index < count; index++) {
    const { key, holder, waiters } = rows[index];
    const row = tableBody.children[index];
    row.lockKey = key;
    setText(row.firstElementChild.firstElementChild, printable(key));
    const left = holder && holder.ends !== null ? holder.ends - now : null;
    const texts = holder
      ? [holder.mode, holder.label === null ? "" : printable(holder.label), holder.token || "",
        holder.since === null ? "" : formatDuration(now - holder.since), left === null ? "" : formatDuration(left)]
      : ["free", "", "", "", ""];
    [...texts, waiters ? String(waiters) : ""].forEach((text, column) => setText(row.children[column + 1], text));
    row.className = holder ? "" : "free";
    row.children[5].className = left !== null && left < 0 ? "bad" : "";
  }
  byId("more").hidden = rows.length <= count;
  byId("more").firstElementChild.textContent = rows.length + " rows, " + count + " shown.";
  for (const heading of document.querySelectorAll("#locks th")) {
    const isSorted = heading.firstElementChild && heading.firstElementChild.dataset.sort === sort.by;
    if (isSorted) heading.setAttribute("aria-sort", sort.descending ? "descending" : "ascending");
    else heading.removeAttribute("aria-sort");
  }
}

// The waits

function waitLine(wait) {
  const line = element("li");
  line.append(textOf(wait.waiter), " waits for ", textOf(wait.key), " (" + wait.mode + "), held by ", textOf(wait.holder));
  if (wait.deadlock !== null) line.className = "bad";
  return line;
}

const DEADLOCKS_MAX = 5;

function drawWaits() {
  const alarm = byId("alarm");
  alarm.hidden = graph.deadlocks.length === 0;
  const alarms = graph.deadlocks.slice(0, DEADLOCKS_MAX).map((labels, index) => {
    const line = element("p");
    line.append(element("strong", "Possible deadlock: "));
    const waits = graph.waits.filter((wait) => wait.deadlock === index).slice(0, 10);
    // The list of waits is limited, so the waits of this deadlock may be missing.
    if (waits.length === 0) labels.slice(0, 10).forEach((label, position) => line.append(position ? ", " : "", textOf(label)));
    waits.forEach((wait, position) => {
      line.append(position ? "; " : "", textOf(wait.waiter), " waits for ", textOf(wait.key), ", held by ", textOf(wait.holder));
    });
    if (labels.length > 10) line.append("; " + labels.length + " labels in all");
    return line;
  });
  const others = graph.deadlocks.length - alarms.length;
  if (others) alarms.push(element("p", "and " + others + " more"));
  fill(alarm, alarms);
  byId("waits").hidden = graph.waits.length === 0;
  const listed = graph.waits.slice(0, 50);
  const lines = listed.map(waitLine);
  const omitted = graph.waits.length - listed.length + graph.omitted;
  if (omitted) lines.push(element("li", "and " + omitted + " more", "weak"));
  if (!graph.is_complete) lines.push(element("li", "There are too many waits to examine all; deadlocks may be missing.", "weak"));
  fill(document.querySelector("#waits ul"), lines);
  fill(byId("graph"), graph.waits.length ? [drawGraph(graph.waits.slice(0, 40))] : []);
}

const SVG = "http://www.w3.org/2000/svg";
function shape(name, attributes, text) {
  const created = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) created.setAttribute(attribute, value);
  if (text !== undefined) created.textContent = text;
  return created;
}

function arrowHead(id, className) {
  const marker = shape("marker", { id, class: className, viewBox: "0 0 10 10", refX: 9, refY: 5,
    markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" });
  marker.append(shape("path", { d: "M0 0 L10 5 L0 10 z" }));
  return marker;
}

// Draws the labels on a circle, and an arrow from each waiter to each holder that blocks it.
function drawGraph(waits) {
  const labels = Array.from(new Set(waits.flatMap((wait) => [wait.waiter, wait.holder])));
  const deadlocked = new Set(waits.filter((wait) => wait.deadlock !== null).flatMap((wait) => [wait.waiter, wait.holder]));
  const [boxWidth, boxHeight] = [150, 26];
  const radius = Math.max(90, labels.length * 22);
  const [width, height] = [2 * radius + boxWidth + 260, 2 * radius + boxHeight + 60];
  const positions = new Map(labels.map((label, index) => {
    const angle = 2 * Math.PI * index / labels.length - Math.PI;
    return [label, { x: width / 2 + (radius + 100) * Math.cos(angle), y: height / 2 + radius * Math.sin(angle) }];
  }));
  const svg = shape("svg", { viewBox: "0 0 " + width + " " + height, width, height, role: "img" });
  svg.append(shape("title", {}, "An arrow leads from each waiter to each holder for which it waits"));
  svg.append(arrowHead("head", ""), arrowHead("deadlock-head", "deadlock"));
  for (const wait of waits) {
    const [from, to] = [positions.get(wait.waiter), positions.get(wait.holder)];
    const [dx, dy] = [to.x - from.x, to.y - from.y];
    const length = Math.hypot(dx, dy) || 1;
    // The bend separates the two arrows between processes that wait for each other.
    const bend = { x: (from.x + to.x) / 2 - dy / length * 40, y: (from.y + to.y) / 2 + dx / length * 40 };
    const edge = (at) => {
      const [ex, ey] = [bend.x - at.x, bend.y - at.y];
      const scale = Math.min(boxWidth / 2 / (Math.abs(ex) || 1e-9), boxHeight / 2 / (Math.abs(ey) || 1e-9));
      return (at.x + ex * scale).toFixed(1) + " " + (at.y + ey * scale).toFixed(1);
    };
    const isDeadlock = wait.deadlock !== null;
    svg.append(shape("path", {
      d: "M" + edge(from) + " Q" + bend.x.toFixed(1) + " " + bend.y.toFixed(1) + " " + edge(to),
      class: isDeadlock ? "deadlock" : "", "marker-end": isDeadlock ? "url(#deadlock-head)" : "url(#head)",
    }));
    const middle = { x: (from.x + to.x) / 4 + bend.x / 2, y: (from.y + to.y) / 4 + bend.y / 2 };
    svg.append(shape("text", { x: middle.x.toFixed(1), y: (middle.y - 4).toFixed(1), class: "key" }, shortened(wait.key, 24)));
  }
  for (const [label, at] of positions) {
    svg.append(shape("rect", { x: at.x - boxWidth / 2, y: at.y - boxHeight / 2, width: boxWidth, height: boxHeight, rx: 4,
      class: deadlocked.has(label) ? "deadlock" : "" }));
    const text = shape("text", { x: at.x, y: at.y + 4 }, shortened(label, 20));
    text.append(shape("title", {}, printable(label)));
    svg.append(text);
  }
  return svg;
}

// The details of a key

function select(key) {
  selected = key;
  byId("details").hidden = key === null;
  byId("broken").textContent = "";
  byId("sure").checked = false;
  if (key !== null) {
    fill(document.querySelector("#details h2"), [textOf(key)]);
    drawDetails();
    drawHistory();
  }
}

function claimantLine(claim, separator, parts) {
  const line = element("li");
  line.append(labelOf(claim.label), separator + [claim.mode, ...parts].join(", "));
  return line;
}

function drawDetails() {
  if (selected === null) return;
  const now = serverNow();
  const lock = locks.get(selected) || {};
  const holders = (lock.holders || []).map((holder) => claimantLine(holder, ": ", [
    holder.since === null ? "" : "for " + formatDuration(now - holder.since),
    holder.ends === null ? "" : "lease ends in " + formatDuration(holder.ends - now),
    holder.token ? "token " + holder.token : "",
  ].filter(Boolean)));
  const waiters = (lock.waiters || []).map((waiter) => claimantLine(waiter, " waits: ", [
    waiter.since === null ? "" : "for " + formatDuration(now - waiter.since),
  ].filter(Boolean)));
  fill(byId("holders"), holders.length ? holders : [element("li", "none", "weak")]);
  fill(byId("waiters"), waiters.length ? waiters : [element("li", "none", "weak")]);
  byId("break").hidden = !mayBreak || !holders.length && !byId("broken").textContent;
}

// The key is a query parameter: in a path, a browser would resolve a segment such as `..`.
const address = (key) => "api/locks?key=" + encodeURIComponent(key);

const LANES_MAX = 12;
const HISTORY_MS = 30 * 60 * 1000;

let fetching = null;

async function drawHistory() {
  const key = selected;
  if (key === null || fetching === key) return;
  fetching = key;
  let history;
  try {
    history = (await (await fetch(address(key))).json()).history || [];
  } catch {
    return;
  } finally {
    if (fetching === key) fetching = null;
  }
  if (selected !== key) return;
  const now = serverNow();
  const begin = Math.max(now - HISTORY_MS, Math.min(now - 10000, ...history.map((hold) => hold.began_ms)));
  const lanes = new Map();
  for (const hold of history.filter((hold) => hold.last_seen_ms >= begin).reverse()) {
    if (!lanes.has(hold.label) && lanes.size === LANES_MAX) continue;
    if (!lanes.has(hold.label)) lanes.set(hold.label, []);
    lanes.get(hold.label).push(hold);
  }
  byId("span").textContent = "The last " + formatDuration(now - begin) + ". Holds that begin and end between two readings of the store are missing.";
  const drawn = Array.from(lanes, ([label, holds]) => {
    const lane = element("div", undefined, "lane");
    const track = element("div", undefined, "track");
    for (const hold of holds) {
      const bar = element("div", undefined, "bar " + hold.mode.split(" ")[0] + (hold.ended ? " ended" : ""));
      const end = hold.ended ? hold.last_seen_ms : now;
      const percent = (time) => 100 * (Math.max(time, begin) - begin) / (now - begin);
      bar.style.left = Math.min(99.5, percent(hold.began_ms)) + "%";
      bar.style.width = percent(end) - percent(hold.began_ms) + "%";
      bar.title = hold.mode + ", " + formatDuration(end - hold.began_ms) + " from " + new Date(hold.began_ms).toLocaleTimeString();
      track.append(bar);
    }
    lane.append(labelOf(label), track);
    return lane;
  });
  const scale = element("div", undefined, "scale");
  scale.append(element("span", new Date(begin).toLocaleTimeString()), element("span", "now"));
  const axis = element("div", undefined, "lane");
  axis.append(element("span"), scale);
  fill(byId("timeline"), drawn.length ? [...drawn, axis] : []);
}

async function breakLock(event) {
  event.preventDefault();
  const key = selected;
  const headers = { Authorization: "Bearer " + byId("token").value };
  let result;
  try {
    const answer = await (await fetch(address(key), { method: "DELETE", headers })).json();
    result = answer.error || (answer.broken ? "The lock was released." : "The key was no longer locked.");
  } catch (error) {
    result = "The server did not answer: " + error.message;
  }
  if (selected === key) byId("broken").textContent = result;
  byId("sure").checked = false;
}

// Events

function drawNumbers() {
  const status = byId("status");
  const age = numbers ? serverNow() - numbers.at : 0;
  if (numbers) {
    byId("numbers").textContent = store + ": " + numbers.held + " held, " + numbers.waiting + " waiting, "
      + numbers.rate.toFixed(1) + " grants/s";
  }
  const problem = !connected ? "no connection to lockreg; reconnecting" : numbers && numbers.error;
  status.textContent = problem ? printable(problem) + (numbers ? " (data from " + formatDuration(age) + " ago)" : "")
    : numbers ? "live" + (age > 5000 ? ", read " + formatDuration(age) + " ago" : "") : "connecting";
  status.className = problem ? "bad" : "";
}

let connected = true;
let source = null;

// Browsers open at most six connections to a server. If hidden pages kept theirs, a seventh page
// would not load, and no page could fetch past holders or release a lock.
function connect() {
  if (document.hidden) {
    if (source) source.close();
    source = null;
    return;
  }
  if (source) return;
  source = new EventSource("events");
  source.onopen = () => { connected = true; drawNumbers(); };
  source.onerror = () => { connected = false; drawNumbers(); };
  source.onmessage = receive;
}

function receive(event) {
  const update = JSON.parse(event.data);
  connected = true;
  numbers = update;
  clockOffset = Math.min(clockOffset, Date.now() - update.now);
  if (update.all) locks.clear();
  for (const key of update.removed) locks.delete(key);
  for (const row of update.set) locks.set(row.key, row);
  if (update.graph) {
    graph = update.graph;
    drawWaits();
  }
  draw();
  drawHistory();
}

function draw() {
  if (document.hidden) return;
  drawNumbers();
  drawTable();
  drawDetails();
}

byId("filter").addEventListener("input", () => { rowLimit = 200; drawTable(); });
document.querySelector("#more button").addEventListener("click", () => { rowLimit += 1000; drawTable(); });
for (const button of document.querySelectorAll("#locks th button")) {
  button.addEventListener("click", () => {
    const by = button.dataset.sort;
    sort = { by, descending: sort.by === by ? !sort.descending : LARGEST_FIRST.includes(by) };
    drawTable();
  });
}
byId("close").addEventListener("click", () => select(null));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") select(null); });
document.addEventListener("visibilitychange", () => { connect(); draw(); });
byId("break").addEventListener("submit", breakLock);
setInterval(draw, 1000);
connect();
