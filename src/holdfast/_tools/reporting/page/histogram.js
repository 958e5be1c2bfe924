// The distribution of a tensor's elements, and the numbers about them.

function histogram(statistics) {
  const counts = statistics.counts;
  if (!counts.length) return [make("p", { class: "small soft" }, statistics.finite ? "nothing to draw" : "no finite elements")];
  const most = Math.max(1, ...counts);
  const image = draw("svg", { class: "histogram", viewBox: `0 0 ${counts.length} 100`, preserveAspectRatio: "none", role: "img",
    "aria-label": `Histogram from ${numberText(statistics.minimum)} to ${numberText(statistics.maximum)}` });
  counts.forEach((count, at) => {
    if (!count) return;
    const high = Math.max(1.5, (count / most) * 100);
    image.append(draw("rect", { x: at + 0.06, y: 100 - high, width: 0.88, height: high }, draw("title", {}, `${countText(count)} elements`)));
  });
  return [image, make("div", { class: "ends" }, make("span", {}, numberText(statistics.minimum)), make("span", {}, numberText(statistics.maximum)))];
}

function statisticsRows(statistics) {
  const part = (count) => `${countText(count)}${count && statistics.count ? ` (${percentText(count / statistics.count)})` : ""}`;
  return [
    ["mean ± std", `${numberText(statistics.mean)} ± ${numberText(statistics.std)}`],
    ["norm", numberText(statistics.norm)],
    ["zeros", part(statistics.zeros)],
    ...(statistics.nan ? [["NaN", part(statistics.nan)]] : []),
    ...(statistics.inf ? [["infinite", part(statistics.inf)]] : []),
  ];
}

// What is wrong with the elements, if anything is.
function notFinite(statistics) {
  const found = [];
  if (statistics.nan) found.push(`${countText(statistics.nan)} NaN`);
  if (statistics.inf) found.push(`${countText(statistics.inf)} infinite`);
  return found.join(", ");
}

function showStatistics(section, facts, onSelect) {
  const numbers = Object.keys(facts.statistics).map(Number);
  if (!numbers.length) return false;
  const isBad = (number) => (notFinite(facts.statistics[number]) ? 1 : 0);
  numbers.sort((a, b) => isBad(b) - isBad(a) || facts.entries.nbytes(b) - facts.entries.nbytes(a) || a - b);
  const grid = make("div", { class: "histograms" });
  const addSome = (from, to) => grid.append(...numbers.slice(from, to).map((number) => histogramCard(facts, number, onSelect)));
  const first = matchMedia("(max-width: 700px)").matches ? 8 : 24;
  addSome(0, first);
  section.append(
    make("div", { class: "section-head" }, make("h2", {}, "Statistics"),
      make("p", { class: "small soft" }, `of ${plural(numbers.length, "tensor")}${numbers.length < facts.totals.tensors ? ` out of ${countText(facts.totals.tensors)}` : ""}`)),
    grid);
  if (numbers.length > first) section.append(moreButton(`Show all ${countText(numbers.length)}`, () => addSome(first, numbers.length)));
  return true;
}

function histogramCard(facts, number, onSelect) {
  const statistics = facts.statistics[number];
  const bad = notFinite(statistics);
  return make("button", { type: "button", class: "card", onclick: () => onSelect(number), title: facts.entries.keys[number] },
    make("div", { class: "key" }, make("bdi", {}, facts.entries.keys[number])),
    ...histogram(statistics),
    make("div", { class: "small soft number" }, bad ? make("span", { class: "chip bad" }, bad) : `${numberText(statistics.mean)} ± ${numberText(statistics.std)}`));
}

function moreButton(text, onClick) {
  const button = make("button", { type: "button", class: "more", onclick: () => { onClick(); button.remove(); } }, text);
  return button;
}
