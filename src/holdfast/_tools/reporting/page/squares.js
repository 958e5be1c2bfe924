// Rectangles whose areas are as given, as near to squares as they can be (after Bruls, Huizing and van Wijk).

// `weights` are positive and descend. Calls `place(number, x, y, width, height)` for each.
function squarify(weights, x, y, width, height, place) {
  let left = weights.reduce((sum, weight) => sum + weight, 0);
  let first = 0;
  while (first < weights.length && left > 0) {
    const side = Math.min(width, height);
    const scale = (width * height) / left; // pixels per weight
    let last = first;
    let sum = 0;
    let worst = Infinity;
    while (last < weights.length) {
      const grown = sum + weights[last];
      const thick = (grown * scale) / side;
      const long = (weights[first] * scale) / thick;
      const short = (weights[last] * scale) / thick;
      const ratio = Math.max(long / thick, thick / short);
      if (ratio > worst) break;
      worst = ratio;
      sum = grown;
      last += 1;
    }
    const thick = (sum * scale) / side;
    let at = 0;
    for (let number = first; number < last; number++) {
      const length = (weights[number] * scale) / thick;
      if (width >= height) place(number, x, y + at, thick, length);
      else place(number, x + at, y, length, thick);
      at += length;
    }
    if (width >= height) {
      x += thick;
      width -= thick;
    } else {
      y += thick;
      height -= thick;
    }
    left -= sum;
    first = last;
  }
}
