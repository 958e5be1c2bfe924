// How long each rank spent in the phases of the save.

const MOST_LANES = 20;
const PHASES = {
  capture: "describe the state", stage: "copy it aside", compare: "compare copies", plan: "agree who writes what",
  write: "write files", commit: "commit",
};

function saveSeconds(phases) {
  const names = Object.keys(phases);
  const count = Math.max(0, ...names.map((name) => phases[name].length));
  return Array.from({ length: count }, (_, rank) => names.reduce((sum, name) => sum + (phases[name][rank] ?? 0), 0));
}

function showTimeline(section, facts) {
  const phases = facts.checkpoint.phases;
  const names = Object.keys(phases);
  const totals = saveSeconds(phases);
  if (!totals.length) return false;
  const longest = Math.max(...totals, 1e-9);
  let ranks = totals.map((_, rank) => rank);
  const isCut = ranks.length > MOST_LANES;
  if (isCut) ranks = ranks.sort((a, b) => totals[b] - totals[a]).slice(0, MOST_LANES);
  const slowest = totals.indexOf(Math.max(...totals));
  const lane = (rank) => make("div", { class: "bar" },
    make("span", {}, `rank ${rank}`),
    make("div", { class: "track", role: "img", "aria-label": laneText(phases, rank) }, names.map((name, number) => make("div", {
      class: "fill", title: `${PHASES[name] ?? name}: ${secondsText(phases[name][rank] ?? 0)}`,
      style: { width: `${((phases[name][rank] ?? 0) / longest) * 100}%`, background: phaseColour(number) },
    }))),
    make("span", { class: "figure" }, make("b", {}, secondsText(totals[rank])), ` · ${laneShort(phases, rank)}`));
  section.append(
    make("div", { class: "section-head" }, make("h2", {}, "Time of the save"),
      make("p", { class: "small soft" }, totals.length > 1 ? `rank ${slowest} took longest${isCut ? `; the ${MOST_LANES} slowest of ${totals.length} ranks` : ""}` : "phases one after the other")),
    make("div", { class: "card padded" },
      make("div", { class: "bars" }, ranks.map(lane)),
      make("ul", { class: "legend small more" }, names.map((name, number) => make("li", {},
        make("span", { class: "swatch", style: { background: phaseColour(number) } }), make("span", {}, PHASES[name] ?? name))))));
  return true;
}

const laneText = (phases, rank) => Object.keys(phases).map((name) => `${name} ${secondsText(phases[name][rank] ?? 0)}`).join(", ");

// The phase that took longest.
function laneShort(phases, rank) {
  const name = Object.keys(phases).reduce((a, b) => ((phases[b][rank] ?? 0) > (phases[a][rank] ?? 0) ? b : a));
  return `${name} ${secondsText(phases[name][rank] ?? 0)}`;
}
