// What it is, whether it is intact, how large, by whom: the first things to know.

const FORMATS = { native: "Holdfast", dcp: "torch.distributed.checkpoint", safetensors: "safetensors", torch: "torch.save" };

function showSummary(section, facts) {
  const { checkpoint } = facts;
  const written = checkpoint.written;
  const saved = written.time ? new Date(written.time) : null;
  const isDate = saved && !Number.isNaN(saved.getTime());
  filled(section, {}, [
    make("h1", {}, checkpoint.name),
    make("p", { class: "path mono soft wrap" }, checkpoint.path),
    make("div", { class: "chips" }, [
      healthChip(facts),
      make("span", { class: "chip" }, FORMATS[checkpoint.format] ?? checkpoint.format),
      checkpoint.step !== null ? make("span", { class: "chip" }, `step ${countText(checkpoint.step)}`) : null,
      checkpoint.reason ? make("span", { class: "chip" }, checkpoint.reason) : null,
      isDate ? make("span", { class: "chip", title: saved.toISOString() }, `saved ${dateText(saved)}`) : null,
    ]),
    notices(facts),
    make("dl", { class: "tiles" }, tiles(facts).map(([name, value, more]) => make("div", { class: "tile" },
      make("dt", {}, name), make("dd", {}, value), make("dd", {}, more || "\u00a0")))),
    notedLists(facts, isDate ? saved : null),
  ]);
}

function healthChip({ verify, unread }) {
  const lost = Object.keys(unread).length;
  if (!verify && lost) return make("span", { class: "chip bad" }, `✕ ${plural(lost, "tensor")} cannot be read`);
  if (!verify) return make("span", { class: "chip", title: "holdfast verify reads everything and compares all digests" }, "digests not checked");
  if (!verify.ok) return make("span", { class: "chip bad" }, `✕ damaged: ${plural(verify.damage.length, "place")}`);
  if (verify.checked === "none") return make("span", { class: "chip warn" }, "readable; it has no digests");
  return make("span", { class: "chip good" }, verify.checked === "all" ? "✓ intact: all digests agree" : "✓ digests agree, where there are any");
}

function notices(facts) {
  const found = [];
  for (const damage of facts.verify ? facts.verify.damage.slice(0, 20) : []) found.push(["bad", damage]);
  for (const [number, problem] of facts.verify ? [] : Object.entries(facts.unread).slice(0, 20)) found.push(["bad", `${facts.entries.keys[number]}: ${problem}`]);
  if (facts.placement.problem) found.push(["bad", facts.placement.problem]);
  const bad = Object.values(facts.statistics).filter((statistics) => notFinite(statistics)).length;
  if (bad) found.push(["warn", `${plural(bad, "tensor")} ${bad === 1 ? "has" : "have"} elements that are NaN or infinite.`]);
  if (facts.placement.ranks.length > 1 && imbalance(facts.placement.ranks) > 1.5) {
    found.push(["warn", `One rank wrote ${imbalance(facts.placement.ranks).toFixed(1)} × as much as the average.`]);
  }
  if (facts.verify && facts.verify.why && facts.verify.checked !== "all") found.push([facts.verify.checked === "none" ? "warn" : "info", facts.verify.why]);
  return found.length ? make("div", { class: "notices" }, found.map(([kind, text]) => make("p", { class: `notice ${kind}` }, text))) : null;
}

function tiles({ totals, placement, checkpoint, compare }) {
  const seconds = timesOf(checkpoint.phases).length;
  const world = checkpoint.written.world_size ?? (placement.ranks.length || null);
  const grown = compare ? totals.bytes - compare.totals.bytes : 0;
  return [
    ["Size", sizeText(totals.disk || totals.bytes), grown ? `${grown > 0 ? "+" : "−"}${sizeText(Math.abs(grown))} of tensors` : `in ${plural(totals.files, "file")}`],
    ["Tensors", countText(totals.tensors), `${plural(totals.values, "value")} beside them`],
    ["Elements", roughly(totals.elements), dtypesText(totals)],
    ...(world ? [["Saved by", plural(world, "rank"), placement.ranks.length > 1 ? `busiest ${imbalance(placement.ranks).toFixed(2)} × average` : ""]] : []),
    ...(seconds ? [["Time", secondsText(seconds), `${sizeText(Math.round(totals.bytes / seconds))}/s`]] : []),
  ];
}

function dtypesText({ dtypes }) {
  const names = Object.entries(dtypes).sort((a, b) => b[1] - a[1]).map(([name]) => name);
  return names.slice(0, 2).join(", ") + (names.length > 2 ? ` and ${names.length - 2} more` : "");
}

function notedLists({ checkpoint, compare }, saved) {
  const { metrics, metadata } = checkpoint;
  const text = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : typeof value === "number" ? numberText(value) : String(value));
  const rows = (values) => Object.entries(values).map(([name, value]) => [name, text(value)]);
  const before = compare ? compare.checkpoint.metrics : {};
  const metricRows = Object.entries(metrics).map(([name, value]) => [name, text(value) + (name in before ? ` (was ${text(before[name])})` : "")]);
  const lists = [["Metrics", metricRows], ["Noted", rows(metadata)]].filter(([, list]) => list.length);
  return [
    make("p", { class: "origin small soft wrap" }, originText(checkpoint, saved)),
    lists.length ? make("div", { class: "noted" }, lists.map(([title, list]) => make("div", {}, make("h3", {}, title), pairs(list)))) : null,
  ];
}

// With what it was written, in one line.
function originText({ written, run, identity }, saved) {
  const words = [];
  if (written.by) words.push(`Written by ${written.by}`);
  if (saved) words.push(agoText(saved));
  if (run) words.push(`run ${run}`);
  for (const [name, value] of Object.entries(written)) {
    if (!["by", "time", "world_size"].includes(name)) words.push(name === "platform" ? String(value) : `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  }
  words.push(`identity ${identity}`);
  return words.filter(Boolean).join(" · ");
}
