// One chat request: upload, events of the response, errors.
// Uses XMLHttpRequest because fetch does not report upload progress.
import { headers, reason } from "./basics.js";

const BUSY = 409; // the session is still locked by an aborted request
const RETRIES = 10;

// Send a request. `on`: {uploading(share), event(data), refused(message), lost(), stopped(), done()}; one of the last
// four is called at the end. Return a function that aborts the request.
export function send(body, on, tries = RETRIES) {
  const request = new XMLHttpRequest();
  let read = 0, again = null, stop = () => request.abort();
  const events = () => {
    if (request.status !== 200) return;
    const end = request.responseText.lastIndexOf("\n\n");
    if (end < read) return;
    for (const block of request.responseText.slice(read, end).split("\n\n")) {
      const line = block.split("\n").find((each) => each.startsWith("data: "));
      if (line && line !== "data: [DONE]") on.event(JSON.parse(line.slice(6)));
    }
    read = end + 2;
  };
  request.open("POST", "v1/chat/completions");
  request.setRequestHeader("Content-Type", "application/json");
  for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
  request.upload.onprogress = (event) => { if (event.lengthComputable) on.uploading(event.loaded / event.total); };
  request.onprogress = events;
  request.onload = () => {
    events();
    if (request.status === 200) on.done();
    else if (request.status === BUSY && tries > 0) {
      again = setTimeout(() => { stop = send(body, on, tries - 1); }, 300);
      stop = () => { clearTimeout(again); on.stopped(); };
    } else on.refused(reason(request.responseText, request.status));
  };
  request.onerror = () => on.lost();
  request.onabort = () => on.stopped();
  request.send(JSON.stringify(body));
  return () => stop();
}
