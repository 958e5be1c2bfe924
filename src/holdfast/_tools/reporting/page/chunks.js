// A drawing of how a tensor is cut: a box for each chunk, coloured by the rank that wrote it.

const WIDE = 400;
const MOST_DRAWN = 5000;
const THIN = 4; // boxes that are smaller have no lines between them

function chunkDrawing(shape, chunks, ranks) {
  const [down, across] = drawnDimensions(shape, chunks);
  const rows = down === null ? 1 : shape[down];
  const columns = across === null ? 1 : shape[across];
  if (!rows || !columns || !chunks.length) return null;
  const high = down === null || chunks.length === 1 ? 44 : Math.max(70, Math.min(240, (WIDE * rows) / columns));
  const left = down === null ? 0 : 14;
  const image = draw("svg", { class: "drawing", viewBox: `0 0 ${WIDE + left} ${high + 16}`, role: "img",
    "aria-label": `${plural(chunks.length, "chunk")} of a tensor of shape ${shapeText(shape)}` });
  for (const chunk of chunks.slice(0, MOST_DRAWN)) {
    const [y, height] = down === null ? [0, high] : span(chunk, down, high / rows);
    const [x, width] = across === null ? [0, WIDE] : span(chunk, across, WIDE / columns);
    const [file, , rank] = chunk.file;
    image.append(draw("rect", { x: x + left, y, width, height, class: Math.min(width, height) < THIN ? "thin" : null, fill: rankColour(rank, ranks) },
      draw("title", {}, `${rank === null ? file : `rank ${rank}`}: ${placeText(chunk)}`)));
    const label = rank === null ? "" : `rank ${rank}`;
    if (label && width > 46 && height > 16) {
      image.append(draw("text", { class: "inside", x: x + left + width / 2, y: y + height / 2 + 4, "text-anchor": "middle" }, label));
    }
  }
  if (across !== null) image.append(draw("text", { x: left + WIDE, y: high + 13, "text-anchor": "end" }, `dimension ${across}: ${countText(columns)} →`));
  if (down !== null) image.append(draw("text", { transform: `translate(9 ${high}) rotate(-90)` }, chunks.length === 1 ? "" : `dim ${down}: ${countText(rows)}`));
  return image;
}

// The two dimensions to draw: those in which it is cut, and then the last ones.
function drawnDimensions(shape, chunks) {
  if (!shape.length) return [null, null];
  const cut = shape.map((size, at) => at).filter((at) => chunks.some((chunk) => chunk.sizes[at] !== shape[at]));
  const others = shape.map((size, at) => at).filter((at) => !cut.includes(at)).reverse();
  const chosen = [...cut, ...others].slice(0, 2).sort((a, b) => a - b);
  return chosen.length === 1 ? [null, chosen[0]] : chosen;
}

const span = (chunk, dimension, scale) => [chunk.offsets[dimension] * scale, chunk.sizes[dimension] * scale];

// As Python slices: [0:512, 0:1024].
const placeText = ({ offsets, sizes }) => (sizes.length ? `[${sizes.map((size, at) => `${offsets[at]}:${offsets[at] + size}`).join(", ")}]` : "whole");
