// What somebody has chosen, kept for the next time. Browsers can forbid that, and a notebook shows pages where it is.

function recall(key) {
  try {
    return localStorage.getItem(`holdfast-${key}`);
  } catch {
    return null;
  }
}

function keepInMind(key, value) {
  try {
    localStorage.setItem(`holdfast-${key}`, value);
  } catch {
    // Then it is chosen for this time only.
  }
}
