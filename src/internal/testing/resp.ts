/** Cuts the bytes of a Redis connection into requests and replies, for the proxy. */

const sizeOf = (buffer: Buffer, from: number, to: number) => Number(buffer.toString("latin1", from, to))

/** So many values follow the first line of a value, and so many bytes of its own. */
const behind = (line: Buffer): { readonly values: number; readonly bytes: number } => {
  const size = sizeOf(line, 1, line.length)
  switch (String.fromCharCode(line[0] ?? 0)) {
    case "$":
    case "!":
    case "=":
      return { values: 0, bytes: size >= 0 ? size + 2 : 0 }
    case "*":
    case "~":
    case ">":
      return { values: Math.max(0, size), bytes: 0 }
    case "%":
      return { values: 2 * size, bytes: 0 }
    case "|":
      // An attribute comes before the value it describes.
      return { values: 2 * size + 1, bytes: 0 }
    default:
      return { values: 0, bytes: 0 }
  }
}

/** Cuts one direction of a RESP2 or RESP3 connection into whole values. It looks at each byte once, however large they are. */
export const framer = (): (chunk: Buffer) => ReadonlyArray<Buffer> => {
  // Of the value under way: its bytes from earlier chunks, those of its unfinished line, and what is still to come.
  let parts: Array<Buffer> = []
  let line: Array<Buffer> = []
  let values = 1
  let bytes = 0
  return (chunk) => {
    const frames: Array<Buffer> = []
    let [start, at] = [0, 0]
    while (at < chunk.length) {
      if (bytes > 0) {
        const some = Math.min(bytes, chunk.length - at)
        bytes -= some
        at += some
      } else {
        const feed = chunk.indexOf("\n", at)
        const end = feed < 0 ? chunk.length : feed + 1
        line.push(chunk.subarray(at, end))
        at = end
        if (feed < 0) break
        const more = behind(line.length === 1 ? line[0]! : Buffer.concat(line))
        values += more.values - 1
        bytes = more.bytes
        line = []
      }
      if (values > 0 || bytes > 0) continue
      parts.push(chunk.subarray(start, at))
      frames.push(parts.length === 1 ? parts[0]! : Buffer.concat(parts))
      parts = []
      values = 1
      start = at
    }
    if (start < chunk.length) parts.push(chunk.subarray(start))
    return frames
  }
}

/** The bulk strings of a flat array, as a request is one; stops at anything else. */
export const words = (frame: Buffer): ReadonlyArray<string> => {
  const found: Array<string> = []
  let at = frame.indexOf("\r\n") + 2
  while (at < frame.length && frame[at] === 0x24) {
    const line = frame.indexOf("\r\n", at)
    const size = sizeOf(frame, at + 1, line)
    if (size < 0) break
    found.push(frame.toString("utf8", line + 2, line + 2 + size))
    at = line + 2 + size + 2
  }
  return found
}
