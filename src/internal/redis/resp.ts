/**
 * How calls of scripts are written. The part that is the same in every call of a session is encoded once, and nothing
 * is kept twice while a call is under way: encoding is most of what a request costs in the client.
 */

const heads = Array.from({ length: 512 }, (_, length) => `$${length}\r\n`)

const head = (length: number): string => heads[length] ?? `$${length}\r\n`

/** One argument of any text. */
export const bulk = (text: string): string => `${head(Buffer.byteLength(text))}${text}\r\n`

/** One argument of ASCII text. */
export const ascii = (text: string): string => `${head(text.length)}${text}\r\n`

const yes = ascii("1")
const empty = ascii("")

/** One argument of any kind. */
export const encode = (arg: string | number | boolean): string =>
  typeof arg === "string" ? bulk(arg) : typeof arg === "number" ? ascii(String(arg)) : arg ? yes : empty

/** The call of a script, without the command's and the script's names. */
export interface Call {
  /** The first key: a cluster finds its way by it. */
  readonly key: string
  /** How many arguments there are, the number of keys included. */
  readonly count: number
  readonly text: string
}

/** The bytes that are sent for it. `script` is the name of the function, the digest, or the source. */
export const message = (command: string, script: string, { count, text }: Call): string =>
  `*${count + 2}\r\n${ascii(command)}${bulk(script)}${text}`

/** A command of few arguments. */
export const command = (name: string, args: ReadonlyArray<string | number>): string =>
  `*${args.length + 1}\r\n${ascii(name)}${args.map(encode).join("")}`

export const call = (keys: ReadonlyArray<string>, args: ReadonlyArray<string | number>): Call => ({
  key: keys[0]!,
  count: 1 + keys.length + args.length,
  text: [keys.length, ...keys, ...args].map(encode).join("")
})
