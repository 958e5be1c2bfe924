// Colours of things that are told apart: parts, dtypes, ranks, changes.

const HUES = [255, 155, 65, 20, 305, 195, 110, 345];
const CHANGES = {
  added: { hue: 155, chip: "good", text: "added" },
  changed: { hue: 65, chip: "warn", text: "changed" },
  shape: { hue: 345, chip: "bad", text: "shape" },
  dtype: { hue: 305, chip: "accent", text: "dtype" },
  removed: { hue: 20, chip: "bad", text: "removed" },
  equal: { hue: null, chip: "", text: "equal" },
};

const NEUTRAL = null;

// `shade` is from 0 to 1 and tells neighbours of one hue apart; `strength`, too, makes it vivid.
function colourOf(hue, shade = 0.5, strength = 1) {
  const light = isDark() ? 0.44 + 0.13 * shade : 0.56 + 0.13 * shade;
  return hue === NEUTRAL ? `oklch(${isDark() ? light - 0.1 : light + 0.06} 0.012 255)` : `oklch(${light} ${(isDark() ? 0.1 : 0.115) * strength} ${hue})`;
}

// Few ranks have colours of their own, many go once around.
function rankHue(rank, count) {
  if (rank === null || rank === undefined) return NEUTRAL;
  return count <= HUES.length ? HUES[rank % HUES.length] : (255 + (rank * 330) / count) % 360;
}

const rankColour = (rank, count) => colourOf(rankHue(rank, count), 0.4);

function phaseColour(number) {
  return colourOf([255, 195, 65, 155, 305, 20, 110][number % 7], 0.5);
}
