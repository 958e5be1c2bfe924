// What the colours of the map mean.

const COLOURINGS = { part: "part", dtype: "dtype", kind: "kind", rank: "rank", change: "change" };

class Colouring {
  constructor(entries, root) {
    this.entries = entries;
    this.parts = [...throughChain(root).children].sort((a, b) => b.bytes - a.bytes);
    this.partHues = new Map(this.parts.map((part, number) => [part, HUES[number % HUES.length]]));
    this.by = entries.changes ? "change" : "part";
    this.known = new Map();
  }

  choices() {
    const ranks = this.entries.placement.ranks.length > 1;
    return Object.keys(COLOURINGS).filter((by) => (by !== "change" || this.entries.changes) && (by !== "rank" || ranks));
  }

  choose(by) {
    this.by = by;
    this.known.clear();
  }

  hueOf(node) {
    if (!this.known.has(node)) this.known.set(node, this.find(node));
    return this.known.get(node);
  }

  find(node) {
    if (this.by === "part") {
      for (let at = node; at; at = at.parent) if (this.partHues.has(at)) return this.partHues.get(at);
      return NEUTRAL;
    }
    if (!isLeaf(node)) { // too small to show what is inside: as most of it
      const largest = node.children.reduce((a, b) => (b.bytes > a.bytes ? b : a));
      return this.hueOf(largest);
    }
    return this.hueOfEntry(node.entry);
  }

  hueOfEntry(number) {
    const entries = this.entries;
    if (this.by === "dtype") return HUES[this.names().indexOf(entries.dtype(number)) % HUES.length];
    if (this.by === "kind") return HUES[this.names().indexOf(entries.kind(number)) % HUES.length];
    if (this.by === "change") return CHANGES[entries.change(number)].hue;
    const ranks = entries.ranks(number);
    return ranks.length === 1 ? rankHue(ranks[0], entries.placement.ranks.length) : NEUTRAL;
  }

  // How much a tensor changed: a millionth is grey, and everything is vivid.
  strengthOf(node) {
    if (this.by !== "change" || !isLeaf(node) || this.entries.change(node.entry) !== "changed") return 1;
    const relative = relativeChange(this.entries, node.entry);
    return Math.max(0.2, Math.min(1.2, 1.2 + Math.log10(Math.max(relative, 1e-12)) / 6));
  }

  names() {
    const columns = this.entries.columns;
    return this.by === "dtype" ? columns.dtypes.map(([name]) => name) : columns.kinds.filter((kind) => kind !== "value");
  }

  // [hue, text] of what can be seen.
  legend() {
    if (this.by === "part") return this.parts.filter((part) => part.bytes > 0).slice(0, 8).map((part) => [this.partHues.get(part), nameOf(part)]);
    if (this.by === "change") {
      return this.entries.facts.compare.statuses.map((change) => [CHANGES[change].hue, CHANGES[change].text]);
    }
    if (this.by === "rank") {
      const ranks = this.entries.placement.ranks;
      const own = ranks.slice(0, 8).map(([rank]) => [rankHue(rank, ranks.length), `rank ${rank}`]);
      return [...own, ...(ranks.length > 8 ? [[rankHue(8, ranks.length), `… ${ranks.length} ranks`]] : []), [NEUTRAL, "several ranks"]];
    }
    return this.names().map((name, number) => [HUES[number % HUES.length], readable(name)]);
  }
}

const readable = (name) => name.replaceAll("_", " ");
