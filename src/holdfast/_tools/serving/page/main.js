// Asks the server every two seconds what there is, as long as somebody can see the page, and shows what has changed.

import { showCharts } from "./charts.js";
import { keep, setText } from "./elements.js";
import { isRunning, nameOf, showSaves } from "./live.js";
import { showTable, startTable } from "./table.js";
import { clock, moment, renewAges, since } from "./times.js";

const PAUSE = 2000;
let tag = null;
let lastAnswer = null;

async function look() {
  try {
    const answer = await fetch("/api/run.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status !== 304) {
      if (!answer.ok) throw new Error(answer.statusText);
      const run = await answer.json();
      tag = answer.headers.get("ETag");
      show(run);
    }
    lastAnswer = new Date();
    showConnection("live", "good");
  } catch {
    const since = lastAnswer ? ` since ${clock(lastAnswer)}` : "";
    showConnection(`the server does not answer${since}`, "bad");
  }
  if (document.hidden) document.addEventListener("visibilitychange", look, { once: true });
  else setTimeout(look, PAUSE);
}

function showConnection(text, kind) {
  const pulse = byId("pulse");
  pulse.className = `pulse small ${kind}`;
  setText(pulse, text);
}

function show(run) {
  document.title = `${run.title} · Holdfast`;
  setText(byId("title"), run.title);
  setText(byId("location"), run.location);
  byId("problem").hidden = !run.problem;
  setText(byId("problem"), run.problem);
  keep(byId("tiles"), tiles(run), (tile) => tile.title, tile);
  showSaves(run);
  showCharts(run);
  showTable(run);
}

function tiles(run) {
  const committed = run.checkpoints.filter((one) => one.state === "committed");
  const others = run.checkpoints.length - committed.length;
  const newest = committed.filter((one) => one.step !== null).at(-1) ?? committed.at(-1);
  const running = run.saves.filter(isRunning).length;
  const found = [
    { title: "Checkpoints", text: countText(committed.length), more: others ? `and ${others} that ${others > 1 ? "are" : "is"} not usable` : "" },
    { title: "Newest", text: newest ? nameOf(newest) : "none yet", at: newest?.saved_at ?? null },
    { title: "On the disk", text: sizeText(run.checkpoints.reduce((all, one) => all + one.bytes, 0)), more: spaceLeft(run, newest) },
  ];
  if (run.owner) {
    const life = { alive: running ? "saving" : "running", dead: "has ended", unknown: "on another machine" }[run.owner.life];
    found.push({ title: "Job", text: life, more: `process ${run.owner.pid} on ${run.owner.host}`, since: run.owner.since });
  }
  return found;
}

function spaceLeft(run, newest) {
  if (run.free_bytes === null) return "";
  const more = newest?.bytes ? Math.floor(run.free_bytes / newest.bytes) : 0;
  const space = `${sizeText(run.free_bytes)} free`;
  return more > 0 && more < 1000 ? `${space}, space for about ${countText(more)} more` : space;
}

function tile(item) {
  return make("div", { class: "tile card", title: item.since ? `since ${moment(item.since)}` : null },
    make("dt", {}, item.title),
    make("dd", { class: "tile-text number wrap" }, item.text),
    make("dd", { class: "small soft wrap" }, item.at ? since(item.at) : item.more ?? ""));
}

startTheme(() => {});
startTable();
look();
setInterval(renewAges, 1000);
