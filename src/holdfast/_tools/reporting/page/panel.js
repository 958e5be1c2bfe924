// All about one entry.

const MOST_CHUNKS = 100;

class Panel {
  constructor(element, facts, { onSelect, onClose }) {
    this.element = element;
    this.facts = facts;
    this.on = { onSelect, onClose };
    this.damaged = new Set(facts.verify ? facts.verify.damagedKeys : []);
    this.close();
  }

  close() {
    this.element.classList.add("is-empty");
    this.element.replaceChildren(make("p", { class: "empty" }, "Choose an entry in the map or in the list to see what it is and how it is stored."));
    this.on.onClose();
  }

  show(number) {
    const entries = this.facts.entries;
    const change = entries.change(number);
    this.element.classList.remove("is-empty");
    this.element.scrollTop = 0;
    this.element.replaceChildren(
      make("div", { class: "head" },
        make("div", { class: "key" }, entries.keys[number]),
        make("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => this.close() }, "✕")),
      ...(this.damaged.has(entries.keys[number]) ? [make("p", { class: "notice bad" }, "Damaged: bytes of it are not as they were written.")] : []),
      ...(number in this.facts.unread ? [make("p", { class: "notice bad" }, `It cannot be read: ${this.facts.unread[number]}`)] : []),
      ...(change && change !== "equal" ? [make("p", {}, make("span", { class: `chip ${CHANGES[change].chip}` }, CHANGES[change].text))] : []),
      ...(entries.isTensor(number) ? this.tensor(number) : this.value(number)));
  }

  // Of a value: how it was before, if it changed.
  value(number) {
    const [type, text] = this.facts.entries.value(number) ?? ["value", ""];
    const difference = this.facts.entries.difference(number);
    return [
      pairs([["type", type]]),
      make("h3", {}, "Value"), make("pre", {}, text),
      ...(difference ? [make("h3", {}, "Before"), make("pre", {}, difference.old)] : []),
    ];
  }

  tensor(number) {
    const entries = this.facts.entries;
    const shape = entries.shape(number);
    const ranks = entries.ranks(number);
    const owner = number < entries.own ? entries.columns.perRank[number] : undefined;
    return [
      pairs([
        ["shape", shapeText(shape)],
        ["dtype", entries.dtype(number)],
        ["size", `${sizeText(entries.nbytes(number))} · ${plural(entries.elements(number), "element")}`],
        ["kind", readable(entries.kind(number)) + (owner === undefined ? "" : ` (of rank ${owner})`)],
        ...(ranks.length ? [["written by", ranks.length > 8 ? `${ranks.length} ranks` : `rank${ranks.length > 1 ? "s" : ""} ${ranks.join(", ")}`]] : []),
        ...this.ties(number),
      ]),
      ...this.difference(number), ...this.statistics(number), ...this.chunks(number),
    ];
  }

  ties(number) {
    const others = this.facts.entries.tiedTo(number).slice(0, 10);
    if (!others.length) return [];
    const link = (other) => make("button", { type: "button", class: "chip mono", onclick: () => this.on.onSelect(other) }, this.facts.entries.keys[other]);
    return [["the same as", make("span", { class: "chips" }, others.map(link))]];
  }

  difference(number) {
    const difference = this.facts.entries.difference(number);
    if (!difference) return [];
    const rows = [];
    if (difference.old !== undefined) rows.push(["was", difference.old]);
    if (difference.wasShape) rows.push(["shape", `was ${shapeText(difference.wasShape)}`]);
    if (difference.wasDtype) rows.push(["dtype", `was ${difference.wasDtype}`]);
    if (difference.elements !== undefined) {
      const of = this.facts.entries.elements(number);
      rows.push(["elements", `${countText(difference.elements)} differ${of ? ` (${percentText(difference.elements / of)})` : ""}`],
        ["largest", numberText(difference.largest)],
        ["norm", `${numberText(difference.norm)} of ${numberText(difference.before)}`],
        ["relative", difference.incomparable ? changeText(difference) : numberText(difference.relative)]);
    }
    return rows.length ? [make("h3", {}, `Change since ${this.facts.compare.checkpoint.name}`), pairs(rows)] : [];
  }

  statistics(number) {
    const statistics = this.facts.statistics[number];
    if (!statistics) return [];
    const bad = notFinite(statistics);
    return [make("h3", {}, "Elements"), ...(bad ? [make("p", { class: "notice bad" }, bad)] : []), ...histogram(statistics), pairs(statisticsRows(statistics))];
  }

  chunks(number) {
    const entries = this.facts.entries;
    const chunks = entries.chunks(number);
    if (!chunks.length) return [];
    const drawing = chunkDrawing(entries.shape(number), chunks, entries.placement.ranks.length);
    const row = (chunk) => [
      chunk.file[2] === null ? "–" : chunk.file[2], make("span", { class: "mono" }, placeText(chunk)), sizeText(chunk.nbytes),
      make("span", { class: "mono" }, chunk.file[0] + (chunk.begin === null ? "" : ` @ ${countText(chunk.begin)}`)),
    ];
    return [
      make("h3", {}, `Stored in ${plural(chunks.length, "chunk")}`), drawing,
      table(["rank", "part", "size", "file @ byte"], chunks.slice(0, MOST_CHUNKS).map(row)),
      chunks.length > MOST_CHUNKS ? make("p", { class: "small soft" }, `and ${countText(chunks.length - MOST_CHUNKS)} more`) : null,
    ].filter(Boolean);
  }
}
