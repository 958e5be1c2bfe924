// When each rank was in which phase of the save. The ranks meet at the end of a phase, so each begins when the slowest has
// ended the one before; only a copy is made by each rank for itself, right after the state was described.

const MOST_LANES = 20;
const PHASES = {
  capture: "describe the state", stage: "copy it aside", compare: "compare copies", plan: "agree who writes what",
  write: "write files",
};
const ALONE = { capture: "stage" };

// For every rank its phases with begin and end in seconds, and the length of the whole.
function timesOf(phases) {
  const names = Object.keys(phases);
  const count = Math.max(0, ...names.map((name) => phases[name].length));
  const lanes = Array.from({ length: count }, () => ({ parts: [], busy: 0, end: 0 }));
  let length = 0;
  names.forEach((name, number) => {
    const goesOn = number > 0 && ALONE[names[number - 1]] === name;
    const began = length;
    lanes.forEach((lane, rank) => {
      const seconds = phases[name][rank] ?? 0;
      const begin = goesOn ? lane.end : began;
      lane.end = begin + seconds;
      lane.busy += seconds;
      lane.parts.push({ name, begin, seconds });
      length = Math.max(length, lane.end);
    });
  });
  return { names, lanes, length };
}

function showTimeline(section, facts) {
  const { names, lanes, length } = timesOf(facts.checkpoint.phases);
  if (!lanes.length) return false;
  const whole = Math.max(length, 1e-9);
  const ranks = lanes.map((_, rank) => rank);
  const nameOf = (rank) => facts.checkpoint.phase_ranks?.[rank] ?? rank;  // not all are recorded, of many
  const slowest = ranks.reduce((a, b) => (lanes[b].busy > lanes[a].busy ? b : a));
  const isCut = ranks.length > MOST_LANES;
  if (isCut) ranks.sort((a, b) => lanes[b].busy - lanes[a].busy).splice(MOST_LANES);
  const lane = (rank) => make("div", { class: "bar" },
    make("span", {}, `rank ${nameOf(rank)}`),
    make("div", { class: "track", role: "img", "aria-label": laneText(lanes[rank], length) }, lanes[rank].parts.map((part, number) => make("div", {
      class: "fill placed", title: `${PHASES[part.name] ?? part.name}: ${secondsText(part.seconds)}, from ${secondsText(part.begin)} on`,
      style: { left: `${(part.begin / whole) * 100}%`, width: `${(part.seconds / whole) * 100}%`, background: phaseColour(number) },
    }))),
    make("span", { class: "figure" }, make("b", {}, secondsText(lanes[rank].busy)), ` · ${laneShort(lanes[rank], length, lanes.length === 1)}`));
  const head = lanes.length === 1 ? "" : `, rank ${nameOf(slowest)} was busy longest${isCut ? `; the ${MOST_LANES} busiest of ${lanes.length} ranks` : ""}`;
  section.append(
    make("div", { class: "section-head" }, make("h2", {}, "Time of the save"),
      make("p", { class: "small soft" }, `${secondsText(length)} without the commit${head}`)),
    make("div", { class: "card padded" },
      make("div", { class: "bars" }, ranks.map(lane)),
      make("ul", { class: "legend small more" }, names.map((name, number) => make("li", {},
        make("span", { class: "swatch", style: { background: phaseColour(number) } }), make("span", {}, PHASES[name] ?? name))),
      lanes.length > 1 ? make("li", {}, make("span", { class: "swatch waits" }), make("span", {}, "wait for others")) : null)));
  return true;
}

const laneText = (lane, length) => [
  ...lane.parts.map(({ name, seconds }) => `${PHASES[name] ?? name} ${secondsText(seconds)}`), `wait for others ${secondsText(length - lane.busy)}`,
].join(", ");

// How long it waited, or if it was alone the phase that took longest.
function laneShort(lane, length, isAlone) {
  const longest = lane.parts.reduce((a, b) => (b.seconds > a.seconds ? b : a));
  return isAlone ? `${longest.name} ${secondsText(longest.seconds)}` : `waited ${secondsText(length - lane.busy)}`;
}
