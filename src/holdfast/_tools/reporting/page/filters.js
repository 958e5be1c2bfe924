// The choices above the list.

const SIZES = [["", "any size"], ["1000", "1 KB or more"], ["1000000", "1 MB or more"], ["100000000", "100 MB or more"], ["1000000000", "1 GB or more"]];

class Filters {
  constructor(element, facts, onChange) {
    this.onChange = onChange;
    this.search = byId("search");
    const { columns, changes, placement } = facts.entries;
    const named = (names) => names.map((name) => [name, readable(name)]);
    const ranks = placement.ranks.map(([rank]) => [String(rank), `rank ${rank}`]);
    const choices = [
      ["dtype", "dtype", [["", "any dtype"], ...columns.dtypes.map(([name]) => [name, name])]],
      ["kind", "kind", [["", "any kind"], ...named(columns.kinds)]],
      ["rank", "rank", [["", "any rank"], ...ranks]],
      ["size", "size", SIZES],
      ["change", "change", changes ? [["", "changed or not"], ["any", "any change"], ...facts.compare.statuses.map((change) => [change, CHANGES[change].text])] : []],
      ["order", "order", [["", "in stored order"], ["size", "largest first"], ["name", "by name"], ...(changes ? [["change", "most changed first"]] : [])]],
    ];
    this.selects = new Map();
    for (const [name, label, options] of choices) {
      if (options.length < 3 && name !== "order") continue; // there is nothing to choose
      const select = make("select", { id: `filter-${name}`, "aria-label": `Filter by ${label}`, onchange: onChange }, options.map(([value, text]) => make("option", { value }, text)));
      this.selects.set(name, select);
      element.append(select);
    }
    this.search.addEventListener("input", onChange);
  }

  get(name) {
    return this.selects.get(name)?.value ?? "";
  }

  set(name, value) {
    const select = this.selects.get(name);
    if (select) select.value = value;
    this.onChange();
  }

  values() {
    return { query: this.search.value.trim(), dtype: this.get("dtype"), kind: this.get("kind"), rank: this.get("rank"), size: this.get("size"), change: this.get("change") };
  }

  clear() {
    this.search.value = "";
    for (const select of this.selects.values()) select.value = "";
  }
}
