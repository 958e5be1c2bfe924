// The list of checkpoints: sorted, filtered, two of them ticked to be compared.

import { keep, setText } from "./elements.js";
import { isRunning, nameOf } from "./live.js";
import { moment, since } from "./times.js";

const MANY = 200;
const MOST_METRICS = 4;
const CHIPS = { committed: "good", "set aside": "warn", damaged: "bad", "being written": "accent", leftover: "warn" };

const ticked = [];
const opened = new Set();
let sorted = { by: "step", isUp: false };
let showsAll = false;
let run = null;

export function showTable(latest) {
  run = latest;
  const names = new Set(run.checkpoints.map((one) => one.name));
  for (const name of [...ticked]) if (!names.has(name)) ticked.splice(ticked.indexOf(name), 1);
  const metrics = metricNames();
  showColumns(metrics);
  const all = allRows();
  const rows = chosen(all);
  const shown = showsAll ? rows : rows.slice(0, MANY);
  keep(byId("rows"), shown.flatMap((one) => rowItems(one, metrics)), (item) => `${item.kind} ${item.one.name}`,
    (item, before) => (item.kind === "details" ? details(item) : row(item, before)));
  setText(byId("count"), rows.length === all.length ? `${all.length}` : `${rows.length} of ${all.length}`);
  byId("empty").hidden = rows.length > 0;
  setText(byId("empty"), all.length ? "None of them matches." : "There is no checkpoint here yet. The first one appears by itself.");
  byId("all-rows").hidden = shown.length === rows.length;
  setText(byId("all-rows"), `Show all ${rows.length}`);
  showComparison();
}

export function startTable() {
  byId("filter").addEventListener("input", () => run && showTable(run));
  byId("all-rows").addEventListener("click", () => {
    showsAll = true;
    showTable(run);
  });
}

// Checkpoints, and saves under names that have no checkpoint yet.
function allRows() {
  const names = new Set(run.checkpoints.map((one) => one.name));
  const saves = run.saves.filter((save) => !names.has(save.name)).map((save) => ({
    name: save.name, step: save.step, state: isRunning(save) ? "being written" : save.activity, bytes: save.bytes,
    saved_at: null, metrics: {}, metadata: {}, phases: {}, why: save.why, isSave: true,
  }));
  const replaced = new Set(run.saves.filter(isRunning).map((save) => save.name));
  return [...run.checkpoints.map((one) => ({ ...one, isReplaced: replaced.has(one.name) })), ...saves];
}

function metricNames() {
  return [...new Set(run.checkpoints.flatMap((one) => Object.keys(one.metrics)))];
}

const COLUMNS = {
  step: (one) => one.step ?? -1,
  state: (one) => one.state,
  size: (one) => one.bytes,
  saved: (one) => (one.saved_at ? Date.parse(one.saved_at) : Infinity),
};

function valueOf(by) {
  if (by.startsWith("metric ")) return (one) => Number(one.metrics[by.slice(7)] ?? NaN);
  return COLUMNS[by];
}

function chosen(all) {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (one) => [nameOf(one), one.step, one.name, one.state, one.pinned ? "pinned" : "", one.why,
    ...Object.keys(one.metrics), ...Object.entries(one.metadata).flat()].join(" ").toLowerCase();
  const rows = words.length ? all.filter((one) => words.every((word) => text(one).includes(word))) : [...all];
  const by = valueOf(sorted.by);
  const sign = sorted.isUp ? 1 : -1;
  return rows.sort((a, b) => {
    const [left, right] = [by(a), by(b)];
    if (Number.isNaN(left) || Number.isNaN(right)) return Number.isNaN(left) - Number.isNaN(right);
    if (left === right) return a.name < b.name ? 1 : -1;
    return (left < right ? -1 : 1) * sign;
  });
}

function showColumns(metrics) {
  const shown = [["step", "Checkpoint"], ["state", "State"], ["size", "Size"], ["saved", "Saved"],
    ...metrics.slice(0, MOST_METRICS).map((name) => [`metric ${name}`, name])];
  const items = [{ by: "tick", title: "" }, ...shown.map(([by, title]) => ({ by, title, order: by === sorted.by ? sorted.isUp : null }))];
  keep(byId("columns"), items, (item) => item.by, (item) => {
    if (item.by === "tick") return make("th", { class: "tick" }, make("span", { class: "unseen" }, "Compare"));
    const sort = item.order === null ? "none" : item.order ? "ascending" : "descending";
    const sign = item.order === null ? "" : item.order ? " ↑" : " ↓";
    return make("th", { "aria-sort": sort, class: isNumber(item.by) ? "right" : null },
      make("button", { type: "button", class: "plain sort", onclick: () => sortBy(item.by) }, item.title + sign));
  });
}

const isNumber = (by) => by === "size" || by.startsWith("metric ");

function sortBy(by) {
  const focused = document.activeElement?.closest("th")?.dataset.key;
  sorted = { by, isUp: sorted.by === by ? !sorted.isUp : by.startsWith("metric ") };
  showTable(run);
  if (focused) [...byId("columns").children].find((th) => th.dataset.key === focused)?.querySelector("button").focus();
}

function rowItems(one, metrics) {
  const isOpened = opened.has(one.name);
  const row = { kind: "row", one, metrics: metrics.slice(0, MOST_METRICS), isTicked: ticked.includes(one.name), isOpened };
  return isOpened ? [row, { kind: "details", one, columns: row.metrics.length + 4 }] : [row];
}

function row(item, before) {
  const { one } = item;
  const hasFocus = before && before.contains(document.activeElement) ? document.activeElement.dataset.what : null;
  const label = nameOf(one);
  const element = make("tr", { class: item.isOpened ? "opened" : null, "data-state": one.state },
    make("td", { class: "tick" }, one.isSave ? null : make("input", {
      type: "checkbox", checked: item.isTicked, "data-what": "tick", "aria-label": `Compare ${label}`, onchange: () => tick(one.name),
    })),
    make("td", { class: "name" },
      one.isSave ? make("b", {}, label) : make("a", { href: `/c/${one.quoted}`, "data-what": "open" }, label),
      make("button", {
        type: "button", class: "plain mini more", "data-what": "more", "aria-expanded": String(item.isOpened),
        "aria-label": `Details of ${label}`, onclick: () => unfold(one.name),
      }, item.isOpened ? "less" : "more")),
    make("td", { "data-title": "State" }, chips(one)),
    make("td", { class: "right number", "data-title": "Size" }, sizeText(one.bytes)),
    make("td", { "data-title": "Saved" }, one.saved_at ? since(one.saved_at) : "—"),
    item.metrics.map((name) => make("td", { class: "right number", "data-title": name },
      Object.hasOwn(one.metrics, name) ? numberText(one.metrics[name]) : "—")));
  if (hasFocus) queueMicrotask(() => element.querySelector(`[data-what="${hasFocus}"]`)?.focus());
  return element;
}

function chips(one) {
  return make("div", { class: "chips" },
    make("span", { class: `chip ${CHIPS[one.state] || ""}`, title: one.why || null }, one.state),
    one.pinned ? make("span", { class: "chip" }, "pinned") : null,
    one.isReplaced ? make("span", { class: "chip accent" }, "being replaced") : null);
}

function details({ one, columns }) {
  const phases = Object.entries(one.phases).map(([name, time]) => `${name} ${secondsText(time)}`).join(", ");
  const facts = [
    ["Why", one.why], ["Folder", one.name], ["Format", one.format], ["Id", one.identity], ["Ranks", one.world_size],
    ["Slowest rank", phases], ["Saved", one.saved_at && moment(one.saved_at)],
    ...Object.entries(one.metrics).map(([name, number]) => [name, String(number)]),
    ...Object.entries(one.metadata),
  ].filter(([, text]) => text !== null && text !== undefined && text !== "");
  const list = make("dl", { class: "details small" },
    facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", { class: "wrap" }, String(text))]));
  return make("tr", { class: "details-row" }, make("td", { class: "tick" }), make("td", { colspan: columns }, list));
}

function unfold(name) {
  if (!opened.delete(name)) opened.add(name);
  showTable(run);
}

// Two at most: the one that was ticked first gives way to a third.
function tick(name) {
  if (ticked.includes(name)) ticked.splice(ticked.indexOf(name), 1);
  else ticked.push(name);
  if (ticked.length > 2) ticked.shift();
  showTable(run);
}

function showComparison() {
  const bar = byId("compare-bar");
  const both = ticked.map((name) => run.checkpoints.find((one) => one.name === name))
    .sort((a, b) => (a.step ?? 0) - (b.step ?? 0));
  const content = JSON.stringify(both.map((one) => one.name));
  bar.hidden = both.length === 0;
  document.body.classList.toggle("has-bar", both.length > 0);
  if (bar.dataset.content === content) return;
  bar.dataset.content = content;
  const text = both.length === 2 ? `${nameOf(both[0])} and ${nameOf(both[1])}` : both.length ? `${nameOf(both[0])} and …` : "";
  bar.replaceChildren(
    make("span", { class: "wrap" }, text),
    both.length === 2
      ? make("a", { class: "button primary", href: `/c/${both[1].quoted}?compare=${both[0].quoted}` }, "Compare")
      : make("span", { class: "small soft" }, "tick another one to compare"),
    make("button", { type: "button", class: "plain", onclick: () => { ticked.length = 0; showTable(run); } }, "Clear"));
}
