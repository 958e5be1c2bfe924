// The map of sizes: every part is an area as large as its bytes.

const MOST_BOXES = 1500; // of one part; what is smaller is drawn as one area

class Treemap {
  constructor(element, entries, root, colouring, { onOpen, onSelect, onHover }) {
    this.element = element;
    this.canvas = element.querySelector("canvas");
    this.mark = element.querySelector(".treemap-mark");
    this.entries = entries;
    this.colouring = colouring;
    this.on = { onOpen, onSelect, onHover };
    this.root = throughChain(root);
    this.node = this.root;
    this.boxes = [];
    this.chosen = -1; // by keyboard, a number in this.tops
    new ResizeObserver(() => this.redraw()).observe(element);
    element.addEventListener("pointermove", (event) => this.point(event));
    element.addEventListener("pointerleave", () => this.unmark());
    element.addEventListener("click", (event) => this.click(event));
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("blur", () => this.unmark());
  }

  show(node) {
    this.node = throughChain(node);
    this.chosen = -1;
    this.redraw();
    this.unmark();
    this.on.onOpen(this.node);
  }

  redraw() {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (!width || !height) return;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.paint = this.canvas.getContext("2d");
    this.paint.scale(scale, scale);
    this.boxes = [];
    this.tops = [];
    this.layOut(this.node, 0, 0, width, height, 0);
  }

  layOut(node, x, y, width, height, depth) {
    const children = node.children.filter((child) => child.bytes > 0).sort((a, b) => b.bytes - a.bytes);
    const shown = children.slice(0, MOST_BOXES);
    const weights = shown.map((child) => child.bytes);
    if (children.length > shown.length) weights.push(node.bytes - weights.reduce((sum, weight) => sum + weight, 0));
    squarify(weights, x, y, width, height, (number, left, top, wide, high) => {
      const child = shown[number];
      if (!child) return this.fill(node, left, top, wide, high, 0.2);
      const place = throughSingles(child);
      const box = { node: place, name: nameFrom(place, node), x: left, y: top, width: wide, height: high, depth };
      if (depth === 0) this.tops.push(box);
      this.box(box, number);
    });
  }

  box(box, number) {
    const { node, name, x, y, width, height, depth } = box;
    if (width * height < 3) return;
    this.boxes.push(box);
    const small = Math.min(width, height);
    const gap = small < 5 ? 0.15 : small < 12 || depth > 1 ? 0.5 : depth === 1 ? 1 : 1.5;
    const inner = { x: x + gap, y: y + gap, width: width - 2 * gap, height: height - 2 * gap };
    if (inner.width < 1 || inner.height < 1) return this.fill(node, x, y, width, height, 0.3);
    const title = !isLeaf(node) && inner.width > 46 && inner.height > 34 && depth < 3 ? 18 : 0;
    const opens = !isLeaf(node) && depth < 5 && inner.width > 8 && inner.height > 8;
    if (!opens) {
      this.fill(node, inner.x, inner.y, inner.width, inner.height, (number % 4) / 4);
      this.write(name, node.bytes, inner, false);
      return;
    }
    if (title) {
      this.paint.fillStyle = isDark() ? "rgb(255 255 255 / 6%)" : "rgb(20 30 50 / 6%)";
      this.paint.fillRect(inner.x, inner.y, inner.width, inner.height);
      this.write(name, node.bytes, inner, true);
    }
    const side = title ? 2 : 0;
    this.layOut(node, inner.x + side, inner.y + title, inner.width - 2 * side, inner.height - title - side, depth + 1);
  }

  fill(node, x, y, width, height, shade) {
    this.paint.fillStyle = colourOf(this.colouring.hueOf(node), shade, this.colouring.strengthOf(node));
    this.paint.fillRect(x, y, width, height);
  }

  write(name, bytes, box, isTitle) {
    if (box.width < 34 || box.height < 15) return;
    const paint = this.paint;
    paint.save();
    paint.beginPath();
    paint.rect(box.x, box.y, box.width - 3, box.height);
    paint.clip();
    paint.font = `${isTitle ? 600 : 500} 11.5px system-ui, sans-serif`;
    paint.textBaseline = "top";
    paint.fillStyle = isTitle && !isDark() ? "#2a2f38" : "#ffffff";
    const size = sizeText(bytes);
    paint.fillText(name, box.x + 5, box.y + 3);
    const wide = paint.measureText(name).width;
    if (isTitle && wide + 90 < box.width) {
      paint.globalAlpha = 0.6;
      paint.font = "400 11.5px system-ui, sans-serif";
      paint.fillText(size, box.x + wide + 12, box.y + 3);
    } else if (!isTitle && box.height > 32) {
      paint.globalAlpha = 0.8;
      paint.font = "400 11px system-ui, sans-serif";
      paint.fillText(size, box.x + 5, box.y + 17);
    }
    paint.restore();
  }

  // The smallest box at a place, and the one of the first level that it is in.
  at(event) {
    const frame = this.canvas.getBoundingClientRect();
    const x = event.clientX - frame.left;
    const y = event.clientY - frame.top;
    const inside = (box) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height;
    return { box: this.boxes.findLast(inside), top: this.tops.find(inside) };
  }

  point(event) {
    const { box } = this.at(event);
    if (box) this.markBox(box);
    else this.unmark();
  }

  click(event) {
    const { top } = this.at(event);
    if (!top) return;
    this.enter(top.node);
  }

  enter(node) {
    if (isLeaf(node)) this.on.onSelect(node.entry);
    else this.show(node);
  }

  up() {
    if (this.node === this.root) return;
    let parent = this.node.parent;
    while (parent !== this.root && parent.children.length === 1) parent = parent.parent;
    this.show(parent);
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key in steps && this.tops.length) {
      this.chosen = (this.chosen + steps[event.key] + this.tops.length) % this.tops.length;
      if (this.chosen < 0) this.chosen = 0;
      this.markBox(this.tops[this.chosen]);
    } else if (event.key === "Enter" && this.chosen >= 0) this.enter(this.tops[this.chosen].node);
    else if (event.key === "Backspace" || event.key === "Escape") this.up();
    else return;
    event.preventDefault();
  }

  markBox(box) {
    this.mark.hidden = false;
    for (const [name, value] of [["left", box.x], ["top", box.y], ["width", box.width], ["height", box.height]]) {
      this.mark.style[name] = `${value}px`;
    }
    this.on.onHover(box.node);
  }

  unmark() {
    this.mark.hidden = true;
    this.on.onHover(null);
  }
}
