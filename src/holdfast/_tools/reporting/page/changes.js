// What changed since another checkpoint.

function showChanges(section, facts, onFilter, onSelect) {
  const compare = facts.compare;
  if (!compare) return false;
  const entries = facts.entries;
  const counts = new Map();
  for (let number = 0; number < entries.count; number++) counts.set(entries.change(number), (counts.get(entries.change(number)) ?? 0) + 1);
  const words = { changed: "with other values", added: "added", removed: "removed", shape: "of another shape", dtype: "of another dtype", equal: "equal" };
  const lists = [largestChanges(facts, onSelect), changedValues(facts, onSelect)].filter(Boolean);
  section.querySelector(".section-head").append(
    make("p", { class: "small soft wrap" }, `from ${compare.checkpoint.name} to ${facts.checkpoint.name}`));
  section.append(make("div", { class: "card padded" },
    make("div", { class: "chips" }, Object.keys(words).filter((change) => counts.get(change)).map((change) => make("button", {
      type: "button", class: `chip ${CHANGES[change].chip}`, "data-change": change, onclick: () => onFilter(change),
    }, `${countText(counts.get(change))} ${words[change]}`))),
    counts.get("equal") === entries.count ? make("p", { class: "more" }, "Nothing changed: all entries are equal.") : null,
    lists.length ? make("div", { class: "columns" }, lists) : null));
  return true;
}

function largestChanges(facts, onSelect) {
  const entries = facts.entries;
  const numbers = Object.keys(facts.compare.differences).map(Number).filter((number) => facts.compare.differences[number].relative !== undefined);
  if (!numbers.length) return null;
  const shown = sorted(entries, numbers, "change").slice(0, 12);
  const finite = shown.map((number) => relativeChange(entries, number)).filter(Number.isFinite);
  const most = Math.max(...finite, 1e-300);
  return make("div", { class: "changed-bars" }, make("h3", {}, "Largest changes, relative to what was there"),
    make("div", { class: "bars" }, shown.map((number) => {
      const relative = relativeChange(entries, number);
      const part = Number.isFinite(relative) ? relative / most : 1;
      return make("button", { type: "button", class: "bar", onclick: () => onSelect(number), title: entries.keys[number] },
        make("span", { class: "mono" }, entries.keys[number]),
        make("div", { class: "track" }, make("div", { class: "fill", style: { width: `${part * 100}%`, background: colourOf(CHANGES.changed.hue, 0.5) } })),
        make("span", { class: "figure" }, changeText(facts.compare.differences[number])));
    })));
}

// Where one of both is NaN there is no difference that could be given in numbers.
function changeText({ relative, incomparable }) {
  if (incomparable) return `${countText(incomparable)} NaN`;
  return typeof relative === "number" ? percentText(relative) : numberText(relative);
}

function changedValues(facts, onSelect) {
  const entries = facts.entries;
  const numbers = Object.keys(facts.compare.differences).map(Number).filter((number) => facts.compare.differences[number].old !== undefined);
  if (!numbers.length) return null;
  return make("div", {}, make("h3", {}, "Values"),
    make("dl", { class: "changed-values" }, numbers.slice(0, 20).map((number) => {
      const { old, new: now } = facts.compare.differences[number];
      return make("div", {},
        make("dt", {}, make("button", { type: "button", class: "mono", onclick: () => onSelect(number) }, entries.keys[number])),
        make("dd", { class: "mono" }, make("span", { class: "before" }, old), " → ", now));
    })),
    numbers.length > 20 ? make("p", { class: "small soft" }, `and ${countText(numbers.length - 20)} more`) : null);
}
