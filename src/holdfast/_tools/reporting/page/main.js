// Puts the page together.

const facts = readFacts();
const entries = facts.entries;
const root = buildTree(entries);
const colouring = new Colouring(entries, root);

const explorer = new Explorer(byId("rows"), entries, root, { onSelect: (number) => select(number) });
const panel = new Panel(byId("panel"), facts, { onSelect: (number) => select(number), onClose: () => explorer.select(-1) });
const treemap = new Treemap(byId("treemap"), entries, root, colouring, { onOpen: showCrumbs, onSelect: (number) => select(number), onHover: showHovered });
const filters = new Filters(byId("filters"), facts, showFound);

// Everything about an entry; from elsewhere than the list, it is looked up in the list too.
function select(number, { reveal = false } = {}) {
  if (reveal) {
    filters.clear();
    showFound();
    if (number < entries.own) explorer.unfold(number);
    if (matchMedia("(min-width: 941px)").matches) byId("contents").scrollIntoView();
  }
  panel.show(number);
  explorer.select(number);
}

function showFound() {
  const wanted = filters.values();
  const order = filters.get("order");
  if (!order && Object.values(wanted).every((value) => value === "")) {
    explorer.showTree();
    byId("matches").textContent = plural(entries.own, "entry", "entries");
    return;
  }
  const numbers = matching(entries, wanted);
  const bytes = numbers.reduce((sum, number) => sum + entries.storedBytes(number), 0);
  byId("matches").textContent = `${countText(numbers.length)} of ${plural(entries.count, "entry", "entries")}, ${sizeText(bytes)}`;
  explorer.showFound(sorted(entries, numbers, order), wanted.query);
}

function filterBy(name, value) {
  filters.clear();
  filters.set(name, value);
  byId("contents").scrollIntoView();
}

function showCrumbs(node) {
  const path = pathOf(node);
  const steps = path.map((step, at) => make("button", {
    type: "button", "aria-current": step === node ? "true" : null, onclick: () => treemap.show(step),
  }, at === 0 ? "all" : nameOf(step)));
  byId("crumbs").replaceChildren(...steps.flatMap((step, at) => (at ? [make("span", {}, "/"), step] : [step])));
}

function showHovered(node) {
  const place = node ?? treemap.node;
  const words = [keyOf(place) || "all", sizeText(place.bytes)];
  if (root.bytes && place !== root) words.push(percentText(place.bytes / root.bytes));
  if (isLeaf(place)) words.push(`${entries.dtype(place.entry)} ${shapeText(entries.shape(place.entry))}`);
  else words.push(plural(place.count, "entry", "entries"));
  byId("treemap-status").textContent = words.join(" · ");
}

function showColouring() {
  treemap.redraw();
  byId("legend").replaceChildren(...colouring.legend().map(([hue, text]) => make("li", {},
    make("span", { class: "swatch", style: { background: colourOf(hue, 0.5) } }), make("span", { title: text }, text))));
}

function showColourChoices() {
  const choices = byId("colour-by");
  choices.append(...colouring.choices().map((by) => make("option", { value: by, selected: by === colouring.by }, COLOURINGS[by])));
  choices.addEventListener("change", () => {
    colouring.choose(choices.value);
    showColouring();
  });
}

// Sections that depend on colours are drawn again when these change.
function showCharts() {
  const show = { balance: (section) => showBalance(section, facts, (rank) => filterBy("rank", String(rank))), time: (section) => showTimeline(section, facts) };
  for (const [id, fill] of Object.entries(show)) {
    byId(id).replaceChildren();
    byId(id).hidden = !fill(byId(id));
  }
}

function showSections() {
  const titles = { summary: "Summary", changes: "Changes", sizes: "Sizes", contents: "Contents", balance: "Balance", time: "Time", statistics: "Statistics", files: "Files" };
  byId("sections").replaceChildren(...Object.keys(titles).filter((id) => !byId(id).hidden).map((id) => make("a", { href: `#${id}` }, titles[id])));
}

// A slash leads to the search from anywhere, an arrow from there to what was found, and Escape closes the panel.
function shortcuts(event) {
  if (event.key === "ArrowDown" && event.target === filters.search) {
    event.preventDefault();
    byId("rows").focus();
  }
  if (event.key === "Escape" && !event.defaultPrevented && event.target !== filters.search) panel.close();
  if (event.key !== "/" || event.ctrlKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  event.preventDefault();
  filters.search.focus();
}

function start() {
  const reveal = (number) => select(number, { reveal: true });
  startTheme(() => {
    showColouring();
    showCharts();
  });
  showSummary(byId("summary"), facts);
  byId("changes").hidden = !showChanges(byId("changes"), facts, (change) => filterBy("change", change), reveal);
  byId("statistics").hidden = !showStatistics(byId("statistics"), facts, reveal);
  byId("files").hidden = !showFiles(byId("files"), facts);
  byId("sizes").hidden = root.bytes === 0;
  showCharts();
  showColourChoices();
  showColouring();
  treemap.show(root);
  showFound();
  showSections();
  byId("footer").textContent = `Made by ${facts.made.by} on ${dateText(new Date(facts.made.time))}. This page is one file and loads nothing from anywhere.`;
  document.addEventListener("keydown", shortcuts);
}

start();
