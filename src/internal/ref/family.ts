/** Names of the members of a family. */

import { checkName } from "../actor/keys.ts"

/** The prefix of its names: so that no family can name the members of another one. */
export const prefixOf = (name: string): string => `${checkName(name, "name").replace(/[%/]/g, encodeURIComponent)}/`

/** The name of a wrong one in messages. */
export const what = "the name of the family and the key"
