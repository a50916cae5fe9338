/* Gradio's page reads all answers from one stream, which the server closes once nothing is pending. An
   event that joins the queue just then is answered into no stream: the page thinks that it has one
   until it reads of the close, and opens no other. What was clicked on had no effect then. So a close
   is passed on only if no event is pending; otherwise the server is asked for the stream again. */
{
  const fetch = window.fetch.bind(window);
  const joining = new Set(); // requests to join the queue that have no response yet
  const pending = new Set(), completed = new Set(); // events by their id

  const join = async (request) => {
    const response = await fetch(...request);
    const { event_id } = await response.clone().json().catch(() => ({}));
    if (event_id && !completed.delete(event_id)) pending.add(event_id);
    return response;
  };

  const isClose = (text) => {
    if (!/^data:.*"msg":"(process_completed|close_stream)"/.test(text)) return false;
    const { msg, event_id } = JSON.parse(text.slice("data:".length));
    if (msg === "process_completed" && !pending.delete(event_id)) completed.add(event_id);
    return msg === "close_stream";
  };

  // The messages of a stream, and of those that follow it while something is pending.
  async function* messages(response, request) {
    for (;;) {
      let unread = "", close = null;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part; !(part = await reader.read()).done; ) {
        const texts = (unread + part.value).split("\n\n");
        unread = texts.pop();
        for (const text of texts) {
          if (isClose(text)) close = text;
          else yield text + "\n\n";
        }
      }
      await Promise.allSettled(joining);
      if (close === null || !pending.size) {
        if (close !== null) yield close + "\n\n";
        return;
      }
      response = await fetch(...request);
      if (!response.ok) throw response;
    }
  }

  const listen = async (request) => {
    const response = await fetch(...request);
    if (!response.ok) return response;
    const read = messages(response, request);
    const encoder = new TextEncoder();
    const body = new ReadableStream({
      async pull(controller) {
        const { value, done } = await read.next();
        if (done) controller.close();
        else controller.enqueue(encoder.encode(value));
      },
      cancel: () => void read.return(),
    });
    return new Response(body, response);
  };

  window.fetch = (...request) => {
    const url = String(request[0]?.url ?? request[0]);
    if (url.includes("/gradio_api/queue/data?")) return listen(request);
    if (!url.includes("/gradio_api/queue/join?")) return fetch(...request);
    const joined = join(request);
    joining.add(joined);
    joined.catch(() => {}).then(() => joining.delete(joined));
    return joined;
  };
}
