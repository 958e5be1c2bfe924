// What the page knows: the columns that were put into it, as they are used.

function readFacts() {
  const facts = JSON.parse(byId("facts").textContent);
  const keys = frontDecoded(facts.entries.key);
  const removed = facts.compare ? frontDecoded(facts.compare.removed.key) : [];
  const entries = new Entries(facts, keys.concat(removed), keys.length);
  return { ...facts, entries };
}

function frontDecoded({ shared, rest }) {
  let before = "";
  return rest.map((text, number) => (before = before.slice(0, shared[number]) + text));
}

// Entries by number. Those from `own` on were removed since the checkpoint that is compared with.
class Entries {
  constructor(facts, keys, own) {
    this.facts = facts;
    this.columns = facts.entries;
    this.placement = facts.placement;
    this.keys = keys;
    this.own = own;
    this.count = keys.length;
    this.bytes = Float64Array.from({ length: own }, (_, number) => this.elements(number) * this.itemsize(number));
    this.lower = keys.map((key) => key.toLowerCase());
    this.changes = facts.compare ? facts.compare.status : null;
  }

  columnsOf(number) {
    return number < this.own ? [this.columns, number] : [this.facts.compare.removed, number - this.own];
  }

  kind(number) {
    const [columns, at] = this.columnsOf(number);
    return columns.kinds[columns.kind[at]];
  }

  isTensor(number) {
    return this.kind(number) !== "value";
  }

  dtype(number) {
    const [columns, at] = this.columnsOf(number);
    return columns.dtype[at] < 0 ? null : columns.dtypes[columns.dtype[at]][0];
  }

  itemsize(number) {
    const [columns, at] = this.columnsOf(number);
    return columns.dtype[at] < 0 ? 0 : columns.dtypes[columns.dtype[at]][1];
  }

  shape(number) {
    const [columns, at] = this.columnsOf(number);
    return columns.shape[at] < 0 ? null : columns.shapes[columns.shape[at]];
  }

  elements(number) {
    const shape = this.shape(number);
    return shape === null ? 0 : shape.reduce((product, size) => product * size, 1);
  }

  nbytes(number) {
    return number < this.own ? this.bytes[number] : this.elements(number) * this.itemsize(number);
  }

  // Tied tensors are stored once, and counted once.
  storedBytes(number) {
    return number < this.own && !(number in this.columns.tied) ? this.bytes[number] : 0;
  }

  // [type, text] of a value.
  value(number) {
    const [columns, at] = this.columnsOf(number);
    return columns.values[at] ?? null;
  }

  tiedTo(number) {
    if (number >= this.own) return [];
    const first = this.columns.tied[number] ?? number;
    const others = Object.entries(this.columns.tied).filter(([, to]) => to === first).map(([from]) => Number(from));
    return others.length ? [first, ...others].filter((other) => other !== number) : [];
  }

  // The chunks of a tensor: offsets, sizes, file number, where they begin.
  chunks(number) {
    if (number >= this.own || this.placement.cut[number] < 0) return [];
    const files = this.placement.lists[this.placement.placed[number]];
    const begins = this.placement.begins ? this.placement.begins[number] : null;
    return this.placement.cuts[this.placement.cut[number]].map(([offsets, sizes], at) => ({
      offsets, sizes, file: this.placement.files[files[at]], begin: begins ? begins[at] : null,
      nbytes: sizes.reduce((product, size) => product * size, 1) * this.itemsize(number),
    }));
  }

  ranks(number) {
    if (number >= this.own || this.placement.placed[number] < 0) return [];
    return this.ranksOfList(this.placement.placed[number]);
  }

  ranksOfList(list) {
    this.knownRanks ??= new Map();
    if (!this.knownRanks.has(list)) {
      const ranks = this.placement.lists[list].map((file) => this.placement.files[file][2]);
      this.knownRanks.set(list, [...new Set(ranks.filter((rank) => rank !== null))].sort((a, b) => a - b));
    }
    return this.knownRanks.get(list);
  }

  change(number) {
    if (!this.changes) return null;
    return number < this.own ? this.facts.compare.statuses[this.changes[number]] : "removed";
  }

  difference(number) {
    return this.facts.compare && number < this.own ? this.facts.compare.differences[number] ?? null : null;
  }
}
