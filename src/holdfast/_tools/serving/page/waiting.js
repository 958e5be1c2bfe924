// Shows how far a report is, and then the report.

import { setText } from "./elements.js";

const { of, compare } = byId("waiting").dataset;
const url = `/api/report.json?of=${of}${compare ? `&compare=${compare}` : ""}`;

async function look() {
  try {
    const answer = await (await fetch(url)).json();
    if (!answer.is_working) {
      location.reload();
      return;
    }
    if (answer.total) {
      byId("bar").max = answer.total;
      byId("bar").value = answer.done;
      setText(byId("far"), `${sizeText(answer.done)} of ${sizeText(answer.total)} read`);
    }
  } catch {
    setText(byId("far"), "The server does not answer. It may have been stopped.");
  }
  setTimeout(look, 700);
}

look();
