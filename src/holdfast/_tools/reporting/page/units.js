// Numbers for people.

const UNITS = ["B", "KB", "MB", "GB", "TB", "PB"];

function sizeText(bytes) {
  if (bytes === null || bytes === undefined) return "unknown";
  let unit = 0;
  while (Math.round(bytes * 10) / 10 >= 1000 && unit < UNITS.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return unit ? `${bytes.toFixed(1)} ${UNITS[unit]}` : `${bytes} B`;
}

const countText = (number) => number.toLocaleString("en-US");

function plural(number, one, many = `${one}s`) {
  return `${countText(number)} ${number === 1 ? one : many}`;
}

// A large number in a few characters: 6.7 B.
function roughly(number) {
  for (const [limit, name] of [[1e12, "T"], [1e9, "B"], [1e6, "M"]]) {
    if (number >= limit) return `${(number / limit).toFixed(number >= 100 * limit ? 0 : number >= 10 * limit ? 1 : 2)} ${name}`;
  }
  return countText(number);
}

function secondsText(seconds) {
  if (seconds >= 90) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds >= 10) return `${seconds.toFixed(1)} s`;
  return seconds >= 0.1 ? `${seconds.toFixed(2)} s` : `${(seconds * 1000).toFixed(seconds >= 0.01 ? 0 : 1)} ms`;
}

// A number of any size. Those that JSON lacks come as text.
function numberText(number) {
  if (number === null || number === undefined) return "–";
  if (typeof number === "string") return { nan: "NaN", inf: "∞", "-inf": "−∞" }[number] ?? number;
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (Number.isInteger(number) && size < 1e9) return countText(number).replace("-", "−");
  const text = size >= 1e5 || size < 1e-3 ? number.toExponential(3) : String(Number(number.toPrecision(5)));
  return text.replace("-", "−").replace("e−", "e-");
}

const percentText = (part) => {
  const percent = part * 100;
  if (percent > 0 && percent < 0.01) return "< 0.01 %";
  return `${percent >= 10 ? percent.toFixed(0) : percent.toFixed(percent >= 1 ? 1 : 2)} %`;
};

const shapeText = (shape) => (shape.length ? shape.map(String).join(" × ") : "one element");

function agoText(date) {
  const seconds = (Date.now() - date.getTime()) / 1000;
  for (const [length, name] of [[31557600, "year"], [2629800, "month"], [86400, "day"], [3600, "hour"], [60, "minute"]]) {
    if (seconds >= length) return `${plural(Math.floor(seconds / length), name)} ago`;
  }
  return seconds >= 0 ? "just now" : "";
}

function dateText(date) {
  return date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}
