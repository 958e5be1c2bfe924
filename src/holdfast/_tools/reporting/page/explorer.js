// The list of entries: a tree, or what was searched for.

class Explorer {
  constructor(element, entries, root, { onSelect }) {
    this.entries = entries;
    this.root = root;
    this.onSelect = onSelect;
    this.element = element;
    this.open = new Set();
    this.rows = [];
    this.active = 0;
    this.selected = -1;
    this.query = "";
    this.largest = Math.max(1, root.bytes);
    this.list = new VirtualList(element, (number) => this.rowElement(number));
    this.empty = make("p", { class: "nothing", hidden: true });
    element.append(this.empty);
    element.addEventListener("keydown", (event) => this.key(event));
    this.openSome();
  }

  // As much of the tree as can be seen at once.
  openSome() {
    const waiting = [this.root];
    let rows = 0;
    while (waiting.length) {
      const node = waiting.shift();
      if (rows + node.children.length > 40 && node !== this.root) continue;
      rows += node.children.length;
      if (node !== this.root) this.open.add(node);
      waiting.push(...node.children.filter((child) => !isLeaf(child)).slice(0, 40).map(throughSingles).filter((child) => !isLeaf(child)));
    }
  }

  showTree() {
    this.rows = [];
    this.query = "";
    this.addRows(this.root, 0);
    this.finish("This checkpoint is empty.");
  }

  addRows(node, depth) {
    for (const child of node.children) {
      const place = throughSingles(child);
      this.rows.push({ node: place, name: nameFrom(place, node), entry: place.entry, depth });
      if (!isLeaf(place) && this.open.has(place)) this.addRows(place, depth + 1);
    }
  }

  showFound(numbers, query) {
    this.rows = numbers.map((entry) => ({ node: null, entry, depth: 0 }));
    this.query = query;
    this.element.scrollTop = 0;
    this.active = 0;
    this.finish("Nothing has all of these.");
  }

  finish(textIfEmpty) {
    this.empty.hidden = this.rows.length > 0;
    this.empty.textContent = textIfEmpty;
    this.active = Math.min(this.active, Math.max(0, this.rows.length - 1));
    this.list.show(this.rows.length);
    this.point();
  }

  rowElement(number) {
    const row = this.rows[number];
    const isPart = row.entry < 0;
    const element = make("div", {
      class: `row${number === this.active ? " active" : ""}`, role: "treeitem", id: `row-${number}`,
      "aria-level": row.depth + 1, "aria-selected": String(row.entry >= 0 && row.entry === this.selected),
      "aria-expanded": isPart ? String(this.open.has(row.node)) : null,
      "aria-setsize": this.rows.length, "aria-posinset": number + 1,
      style: { "--depth": row.depth },
      onclick: () => this.activate(number),
    });
    element.append(...(isPart ? this.partCells(row) : this.entryCells(row)));
    return element;
  }

  partCells({ node, name }) {
    return [
      make("span", { class: "name" }, make("span", { class: "arrow" }, this.open.has(node) ? "▼" : "▶"), make("span", { class: "key", title: name }, name)),
      make("span", { class: "type" }),
      make("span", { class: "shape" }, plural(node.count, "entry", "entries")),
      this.bytesCell(node.bytes),
    ];
  }

  entryCells({ node, name, entry }) {
    const entries = this.entries;
    const key = entries.keys[entry];
    const shape = entries.shape(entry);
    const change = entries.change(entry);
    return [
      make("span", { class: "name" },
        node ? make("span", { class: "arrow" }) : null,
        make("span", { class: node ? "key" : "key from-the-end", title: key }, make("bdi", {}, ...this.marked(node ? name : key))),
        change && change !== "equal" ? make("span", { class: `change chip ${CHANGES[change].chip}` }, CHANGES[change].text) : null),
      make("span", { class: "type" }, entries.dtype(entry) ?? (entries.value(entry) ?? ["value"])[0]),
      make("span", { class: "shape" }, shape ? shapeText(shape) : (entries.value(entry) ?? ["", ""])[1]),
      this.bytesCell(entries.isTensor(entry) ? entries.nbytes(entry) : null),
    ];
  }

  bytesCell(bytes) {
    if (bytes === null) return make("span", { class: "bytes" });
    const share = Math.max(0, Math.min(1, bytes / this.largest));
    return make("span", { class: "bytes" }, sizeText(bytes), make("span", { class: "share", style: { width: `${share * 100}%` } }));
  }

  // A key with the words that were searched for marked.
  marked(text) {
    const words = this.query.toLowerCase().split(/\s+/).filter((word) => word && !/[*?]/.test(word));
    if (!words.length) return [text];
    const pattern = new RegExp(`(${words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "gi");
    return text.split(pattern).map((part, at) => (at % 2 ? make("mark", {}, part) : part));
  }

  activate(number) {
    const row = this.rows[number];
    if (!row) return;
    this.active = number;
    if (row.entry >= 0) this.onSelect(row.entry);
    else this.toggle(row.node);
  }

  toggle(node, wanted = !this.open.has(node)) {
    if (wanted) this.open.add(node);
    else this.open.delete(node);
    const top = this.element.scrollTop;
    this.showTree();
    this.element.scrollTop = top;
    this.list.update();
  }

  select(entry) {
    this.selected = entry;
    const at = this.rows.findIndex((row) => row.entry === entry);
    if (at >= 0) this.active = at;
    this.list.refresh();
    if (at >= 0) this.list.reveal(at);
    this.point();
  }

  // Make sure that an entry can be seen in the tree.
  unfold(entry) {
    const parts = partsOf(this.entries.keys[entry]);
    let node = this.root;
    for (const part of parts.slice(0, -1)) {
      node = node.inner.get(part);
      this.open.add(node);
    }
    this.showTree();
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.list.rowHeight()) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const row = this.rows[this.active];
    if (event.key in steps) this.move(this.active + steps[event.key]);
    else if ((event.key === "Enter" || event.key === " ") && row) this.activate(this.active);
    else if (event.key === "ArrowRight" && row && row.entry < 0) this.open.has(row.node) ? this.move(this.active + 1) : this.toggle(row.node, true);
    else if (event.key === "ArrowLeft" && row && row.node) this.leave(row);
    else return;
    event.preventDefault();
  }

  leave(row) {
    if (row.entry < 0 && this.open.has(row.node)) return this.toggle(row.node, false);
    for (let at = this.active; at >= 0; at--) if (this.rows[at].depth < row.depth) return this.move(at);
  }

  move(to) {
    this.active = Math.max(0, Math.min(this.rows.length - 1, to));
    this.list.reveal(this.active);
    this.list.refresh();
    this.point();
  }

  point() {
    if (this.rows.length) this.element.setAttribute("aria-activedescendant", `row-${this.active}`);
    else this.element.removeAttribute("aria-activedescendant");
  }
}
