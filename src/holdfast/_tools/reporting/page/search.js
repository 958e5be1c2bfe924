// Which entries are meant by what was typed and chosen.

// Words that all have to be in the key. A word with * or ? is a pattern for a whole key, or for the part above some.
function keyTest(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const tests = words.map((word) => {
    if (!/[*?]/.test(word)) return (key) => key.includes(word);
    const body = word.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*+/g, ".*").replace(/\?/g, ".");
    const pattern = new RegExp(`^${body}(?:\\..*)?$`, "su");
    return (key) => pattern.test(key);
  });
  return (key) => tests.every((test) => test(key));
}

// Filters are { query, dtype, kind, rank, size, change }, of which "" stands for any.
function matching(entries, filters) {
  const test = filters.query ? keyTest(filters.query) : null;
  const rank = filters.rank === "" ? null : Number(filters.rank);
  const least = Number(filters.size || 0);
  const found = [];
  for (let number = 0; number < entries.count; number++) {
    if (test && !test(entries.lower[number])) continue;
    if (filters.dtype && entries.dtype(number) !== filters.dtype) continue;
    if (filters.kind && entries.kind(number) !== filters.kind) continue;
    if (least && entries.nbytes(number) < least) continue;
    if (rank !== null && !entries.ranks(number).includes(rank)) continue;
    if (filters.change && !changeFits(entries.change(number), filters.change)) continue;
    found.push(number);
  }
  return found;
}

const changeFits = (change, wanted) => (wanted === "any" ? change !== "equal" : change === wanted);

function sorted(entries, numbers, order) {
  if (order === "size") return [...numbers].sort((a, b) => entries.nbytes(b) - entries.nbytes(a) || a - b);
  if (order === "name") return [...numbers].sort((a, b) => (entries.keys[a] < entries.keys[b] ? -1 : 1));
  if (order === "change") return [...numbers].sort((a, b) => descending(relativeChange(entries, a), relativeChange(entries, b)) || a - b);
  return numbers;
}

function relativeChange(entries, number) {
  const difference = entries.difference(number);
  if (!difference || difference.relative === undefined) return entries.change(number) === "equal" ? -1 : 0;
  return typeof difference.relative === "number" ? difference.relative : Infinity;
}

const descending = (a, b) => (a === b ? 0 : a > b ? -1 : 1); // two infinities are equal, and have no difference
