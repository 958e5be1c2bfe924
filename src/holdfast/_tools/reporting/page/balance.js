// How evenly the ranks shared the work.

const MOST_BARS = 16;

function imbalance(rows) {
  const mean = rows.reduce((sum, [, bytes]) => sum + bytes, 0) / rows.length;
  return mean > 0 ? Math.max(...rows.map(([, bytes]) => bytes)) / mean : 1;
}

function showBalance(section, facts, onRank) {
  const rows = facts.placement.ranks;
  if (!rows.length) return false;
  const ratio = imbalance(rows);
  const words = rows.length === 1 ? "one rank wrote everything"
    : ratio < 1.02 ? "all ranks wrote about the same" : `the busiest rank wrote ${ratio.toFixed(2)} × as much as the average${idleText(rows)}`;
  section.append(
    make("div", { class: "section-head" }, make("h2", {}, "Balance of the ranks"), make("p", { class: "small soft" }, words)),
    make("div", { class: "card padded" }, rows.length <= MOST_BARS ? balanceBars(rows, onRank) : balanceColumns(rows)));
  return true;
}

function idleText(rows) {
  const idle = rows.filter(([, , chunks]) => chunks === 0).length;
  return idle ? `, ${plural(idle, "rank")} wrote nothing` : "";
}

function balanceBars(rows, onRank) {
  const most = Math.max(1, ...rows.map(([, bytes]) => bytes));
  return make("div", { class: "bars" }, rows.map(([rank, bytes, chunks, files]) => make("div", { class: "bar" },
    make("button", { type: "button", class: "chip", title: "Show what it wrote", onclick: () => onRank(rank) }, `rank ${rank}`),
    make("div", { class: "track" }, make("div", { class: "fill", style: { width: `${(bytes / most) * 100}%`, background: rankColour(rank, rows.length) } })),
    make("span", { class: "figure" }, make("b", {}, sizeText(bytes)), ` · ${plural(chunks, "chunk")} · ${plural(files, "file")}`))));
}

// Many ranks as columns side by side.
function balanceColumns(rows) {
  const most = Math.max(1, ...rows.map(([, bytes]) => bytes));
  const sizes = rows.map(([, bytes]) => bytes).sort((a, b) => a - b);
  const wide = 1000 / rows.length;
  const image = draw("svg", { class: "chart", viewBox: "0 0 1000 150", role: "img",
    "aria-label": `Bytes by rank: least ${sizeText(sizes[0])}, most ${sizeText(most)}` });
  rows.forEach(([rank, bytes, chunks], at) => {
    const high = Math.max(1, (bytes / most) * 130);
    image.append(draw("rect", { x: at * wide, y: 132 - high, width: Math.max(0.6, wide * 0.86), height: high, fill: rankColour(rank, rows.length) },
      draw("title", {}, `rank ${rank}: ${sizeText(bytes)}, ${plural(chunks, "chunk")}`)));
  });
  image.append(draw("text", { x: 0, y: 148 }, `rank ${rows[0][0]}`), draw("text", { x: 1000, y: 148, "text-anchor": "end" }, `rank ${rows[rows.length - 1][0]}`));
  return make("div", {}, image, make("p", { class: "small soft" },
    `least ${sizeText(sizes[0])} · median ${sizeText(sizes[Math.floor(sizes.length / 2)])} · most ${sizeText(most)}`));
}

function showFiles(section, facts) {
  const files = facts.placement.files.filter(([, bytes]) => bytes !== null).sort((a, b) => b[1] - a[1]);
  if (!files.length) return false;
  const shown = files.slice(0, 200);
  section.append(make("div", { class: "section-head" }, make("h2", {}, "Files"),
    make("p", { class: "small soft" }, `${plural(files.length, "file")}, ${sizeText(facts.totals.disk)}`)));
  const rows = shown.map(([name, bytes, rank]) => [make("span", { class: "mono" }, name), rank === null ? "–" : `rank ${rank}`, sizeText(bytes)]);
  const holder = make("div", { class: "card padded" }, table(["name", "written by", "size"], rows.slice(0, 12)));
  section.append(holder);
  if (shown.length > 12) {
    section.append(moreButton(`Show ${shown.length < files.length ? "the largest " : "all "}${shown.length}`, () => holder.replaceChildren(table(["name", "written by", "size"], rows))));
  }
  return true;
}
