/** The options of the programs that look for anomalies: what makes no sense ends them at once. */

const stop = (message: string): never => {
  console.error(message)
  process.exit(2)
}

export const whole = (option: string, text: string | undefined): number | undefined => {
  if (text === undefined) return undefined
  const number = Number(text)
  return Number.isSafeInteger(number) && number >= 0 ? number : stop(`--${option} must be a whole number`)
}

export const checkAmong = (option: string, given: ReadonlyArray<string>, known: ReadonlyArray<string>): void => {
  if (given.some((name) => !known.includes(name))) stop(`--${option} must be one of ${known.join(", ")}`)
}

export const minutesOf = (text: string): number => {
  const minutes = Number(text)
  return minutes > 0 ? minutes : stop("--minutes must be a number greater than zero")
}
