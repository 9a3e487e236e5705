/** Names of the members of a family. */

import { checkName } from "../actor/keys.ts"

/** What they begin with: so that no family can name the members of another one. */
export const prefixOf = (name: string): string => `${checkName(name, "name").replace(/[%/]/g, encodeURIComponent)}/`

/** What a wrong one is called. */
export const what = "the name of the family and the key"
