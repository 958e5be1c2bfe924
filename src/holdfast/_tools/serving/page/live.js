// Saves that are under way, and how those ended that were.

import { keep } from "./elements.js";
import { clock, moment, since, span } from "./times.js";

const MOST_RANKS = 64;

export const isRunning = (save) => save.is_running;

export function showSaves(run) {
  byId("live").hidden = run.saves.length === 0 && run.ended.length === 0;
  const saves = [...run.saves].sort((a, b) => isRunning(b) - isRunning(a));
  keep(byId("saves"), saves, (save) => `${save.name} ${save.generation}`, card);
  keep(byId("ended"), run.ended, (one) => `${one.name} ${one.at}`, outcome);
}

export const nameOf = (item) => (item.step === null ? item.name : `step ${countText(item.step)}`);

function card(save) {
  const part = save.expected ? Math.min(1, save.bytes / save.expected) : null;
  return make(
    "article", { class: `card save ${isRunning(save) ? "running" : ""}`, "data-activity": save.activity },
    make("div", { class: "save-head" },
      make("h3", { class: "save-name" }, nameOf(save)),
      make("span", { class: `chip ${chipOf(save.activity)}` }, words(save)),
      make("span", { class: "small soft" }, isRunning(save) ? `since ${clock(save.began_at)}` : moment(save.began_at))),
    isRunning(save) ? bar(part) : null,
    make("p", { class: "small number save-numbers" }, numbers(save)),
    save.why ? make("p", { class: "small soft wrap" }, save.why) : null,
    save.ranks.length > 1 && isRunning(save) ? ranks(save) : null);
}

function bar(part) {
  const attributes = { role: "progressbar", "aria-label": "Written", class: part === null ? "bar unknown" : "bar" };
  if (part !== null) Object.assign(attributes, { "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(part * 100) });
  return make("div", attributes, filledTo(part));
}

function filledTo(part, kind = "bar-fill") {
  return make("div", { class: kind, style: part === null ? {} : { width: `${part * 100}%` } });
}

function numbers(save) {
  if (!isRunning(save)) return sizeText(save.bytes);
  const texts = [save.expected ? `${sizeText(save.bytes)} of about ${sizeText(save.expected)}` : `${sizeText(save.bytes)} so far`];
  if (save.rate) {
    texts.push(`${sizeText(save.rate)}/s`);
    if (save.expected > save.bytes) texts.push(`about ${span((save.expected - save.bytes) / save.rate)} left`);
  }
  return texts.join(" · ");
}

function words(save) {
  if (save.activity === "stalled") return `no bytes for ${span(save.quiet)}`;
  return save.activity === "writing" ? "being written" : save.activity;
}

export function chipOf(activity) {
  return { writing: "accent", committing: "accent", stalled: "warn", leftover: "warn" }[activity] || "";
}

function ranks(save) {
  const largest = Math.max(1, ...save.ranks.map(([, bytes, reserved]) => Math.max(bytes, reserved)));
  const shown = save.ranks.slice(0, MOST_RANKS).map(([rank, bytes, reserved]) => {
    return make("li", {},
      make("span", { class: "soft" }, `rank ${rank}`),
      make("div", { class: "bar thin" }, filledTo(reserved / largest, "bar-reserved"), filledTo(bytes / largest)),
      make("span", { class: "number" }, sizeText(bytes)));
  });
  const more = save.ranks.length - shown.length;
  return make("ul", { class: "ranks small", "aria-label": "Bytes by rank" },
    shown, more > 0 ? make("li", {}, make("span", { class: "soft" }, `and ${more} more ranks`)) : null);
}

function outcome(one) {
  const text = one.outcome === "committed"
    ? ` was committed, after about ${secondsText(one.seconds)}`
    : " failed: what it had written was removed, and nothing was committed";
  return make("li", { class: one.outcome },
    make("span", { class: `chip ${one.outcome === "committed" ? "good" : "bad"}` }, one.outcome),
    make("span", {}, make("b", {}, nameOf(one)), text),
    since(one.at, { class: "soft" }));
}
