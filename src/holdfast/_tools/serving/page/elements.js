// Lists that change while somebody looks at them. Elements themselves are made by dom.js, which reports have too.

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Give `parent` one child for each item, in order. Those whose item is the same as before stay as they are, so that
// nothing loses its focus.
export function keep(parent, items, keyOf, make) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const content = JSON.stringify(item);
    let child = before.get(key);
    before.delete(key);
    if (!child || child.holdfastContent !== content) {
      const fresh = make(item, child);
      fresh.dataset.key = key;
      fresh.holdfastContent = content;
      if (child === next) next = next?.nextElementSibling ?? null;
      child?.remove();
      child = fresh;
    }
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
  }
  for (const child of before.values()) child.remove();
}
