/** Cuts the bytes of a Redis connection into requests and replies, for the proxy. */

const sizeOf = (buffer: Buffer, from: number, to: number) => Number(buffer.toString("latin1", from, to))

/** Where the RESP value that starts at `at` ends, or -1 while it is incomplete. */
const endOf = (buffer: Buffer, at: number): number => {
  let position = at
  let pending = 1
  while (pending > 0) {
    const line = buffer.indexOf("\r\n", position)
    if (line < 0) return -1
    const size = () => sizeOf(buffer, position + 1, line)
    let next = line + 2
    pending--
    switch (String.fromCharCode(buffer[position] ?? 0)) {
      case "$":
      case "!":
      case "=":
        if (size() >= 0) next += size() + 2
        if (next > buffer.length) return -1
        break
      case "*":
      case "~":
      case ">":
        pending += Math.max(0, size())
        break
      case "%":
        pending += 2 * size()
        break
      case "|":
        // An attribute comes before the value it describes.
        pending += 2 * size() + 1
        break
    }
    position = next
  }
  return position
}

/** Cuts one direction of a RESP2 or RESP3 connection into whole values. */
export const framer = (): (chunk: Buffer) => ReadonlyArray<Buffer> => {
  let rest: Buffer = Buffer.alloc(0)
  return (chunk) => {
    const buffer = rest.length === 0 ? chunk : Buffer.concat([rest, chunk])
    const frames: Array<Buffer> = []
    let at = 0
    while (at < buffer.length) {
      const end = endOf(buffer, at)
      if (end < 0) break
      frames.push(buffer.subarray(at, end))
      at = end
    }
    rest = buffer.subarray(at)
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
