// A list of any length, of which only the rows in sight exist.

class VirtualList {
  constructor(element, renderRow) {
    this.element = element;
    this.renderRow = renderRow;
    this.length = 0;
    this.spacer = make("div", { "aria-hidden": "true" });
    this.element.append(this.spacer);
    this.shown = new Map();
    element.addEventListener("scroll", () => this.update(), { passive: true });
    new ResizeObserver(() => this.refresh()).observe(element);
  }

  rowHeight() {
    return matchMedia("(max-width: 700px)").matches ? 50 : 30;
  }

  show(length) {
    this.length = length;
    this.refresh();
  }

  refresh() {
    for (const row of this.shown.values()) row.remove();
    this.shown.clear();
    this.spacer.style.height = `${this.length * this.rowHeight()}px`;
    this.update();
  }

  update() {
    const height = this.rowHeight();
    const first = Math.max(0, Math.floor(this.element.scrollTop / height) - 6);
    const last = Math.min(this.length, Math.ceil((this.element.scrollTop + this.element.clientHeight) / height) + 6);
    for (const [number, row] of this.shown) {
      if (number < first || number >= last) {
        row.remove();
        this.shown.delete(number);
      }
    }
    for (let number = first; number < last; number++) {
      if (this.shown.has(number)) continue;
      const row = this.renderRow(number);
      row.style.top = `${number * height}px`;
      this.shown.set(number, row);
      this.element.append(row);
    }
  }

  reveal(number) {
    const height = this.rowHeight();
    const top = number * height;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top + height > this.element.scrollTop + this.element.clientHeight) {
      this.element.scrollTop = top + height - this.element.clientHeight;
    }
    this.update();
  }
}
