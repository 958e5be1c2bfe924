// Moments and spans of time, as finely as a run that goes on needs them.

import { setText } from "./elements.js";

export function span(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return whole < 86400 ? `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min` : `${Math.floor(whole / 86400)} days`;
}

export function age(iso) {
  const seconds = (Date.now() - Date.parse(iso)) / 1000;
  if (!(seconds >= 5)) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min ago` : agoText(new Date(iso));
}

export const moment = (iso) => dateText(new Date(iso));
export const clock = (iso) => new Date(iso).toLocaleTimeString();

// An element that keeps showing how long ago something was.
export const since = (iso, attributes = {}) => make("time", { datetime: iso, title: moment(iso), ...attributes }, age(iso));

export function renewAges() {
  for (const time of document.querySelectorAll("time[datetime]")) setText(time, age(time.dateTime));
}
