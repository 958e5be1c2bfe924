// Entries as a tree by the parts of their keys.

// Keys are joined by dots; where that would be ambiguous they are JSON in brackets: ["a.b"][3].
function partsOf(key) {
  if (!key.startsWith("[")) return key.split(".");
  const parts = [];
  const step = /\[("(?:[^"\\]|\\.)*"|[^\]]*)\]/y;
  for (let found = step.exec(key); found; found = step.exec(key)) {
    const text = found[1];
    parts.push(text.startsWith('"') ? JSON.parse(text) : text);
    if (step.lastIndex === key.length) return parts;
  }
  return key.split(".");
}

function buildTree(entries) {
  const root = treeNode("", null, -1);
  for (let number = 0; number < entries.own; number++) {
    const parts = partsOf(entries.keys[number]);
    const bytes = entries.storedBytes(number);
    let place = root;
    for (let at = 0; at < parts.length - 1; at++) {
      place.bytes += bytes;
      place.count += 1;
      place.inner ??= new Map();
      let next = place.inner.get(parts[at]);
      if (!next) {
        next = treeNode(parts[at], place, -1);
        place.inner.set(parts[at], next);
        place.children.push(next);
      }
      place = next;
    }
    place.bytes += bytes;
    place.count += 1;
    const leaf = treeNode(parts[parts.length - 1], place, number);
    leaf.bytes = bytes;
    leaf.count = 1;
    place.children.push(leaf);
  }
  return root;
}

function treeNode(name, parent, entry) {
  return { name, parent, entry, bytes: 0, count: 0, children: [], inner: null };
}

const isLeaf = (node) => node.entry >= 0;

// Below a part that holds one other part only, that one is what there is to see.
function throughChain(node) {
  while (node.children.length === 1 && !isLeaf(node.children[0])) node = node.children[0];
  return node;
}

// What a part comes down to: itself, or the only thing in it.
function throughSingles(node) {
  while (node.children.length === 1) node = node.children[0];
  return node;
}

function pathOf(node, from = null) {
  const path = [];
  for (let at = node; at && at !== from; at = at.parent) path.unshift(at);
  return path;
}

const nameOf = (node) => (node.name === "" ? "(no name)" : node.name);

// The name of a node as seen from a part above it.
const nameFrom = (node, above) => pathOf(node, above).map(nameOf).join(".");

const keyOf = (node) => pathOf(node).slice(1).map(nameOf).join(".");
