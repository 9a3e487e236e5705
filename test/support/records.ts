/** Records as actors pack them: what the headers in lua/ say of each. */
import { readdirSync, readFileSync } from "node:fs"

const folder = new URL("../../lua/", import.meta.url)

const fields = new Map(
  readdirSync(folder).filter((file) => file.endsWith(".lua")).flatMap((file) => {
    const records = readFileSync(new URL(file, folder), "utf8").matchAll(/^-- record (\w+) \d+: (.*(?:\n--   .*)*)$/gm)
    return [...records].map(([, name, list]) =>
      [name!, list!.replaceAll(/\n--/g, " ").split(",").map((field) => field.trim())] as const
    )
  })
)

/** The numbers of a record, behind the byte of its version. */
export const unpack = (record: string, packed: Buffer): { readonly [field: string]: number } =>
  Object.fromEntries(fields.get(record)!.map((field, at) => [field, packed.readDoubleLE(1 + 8 * at)]))
