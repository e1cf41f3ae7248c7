// ethers and viem ask for many balances at once; each sends them in one array. Prints how many came, and the first error.
// Arguments: the folder of the packages, the address, the number of balances, the size of viem's arrays.
import { createRequire } from "node:module";

const [modules, url, number, size] = process.argv.slice(2);
const load = createRequire(`${modules}/here.js`);
const { JsonRpcProvider } = load("ethers");
const { createPublicClient, http } = load("viem");

const addresses = [...Array(Number(number)).keys()].map((n) => `0x${n.toString(16).padStart(40, "0")}`);

async function counted(ask) {
  const outcomes = await Promise.allSettled(addresses.map(ask));
  const failed = outcomes.find((outcome) => outcome.status === "rejected");
  const values = outcomes.filter((outcome) => outcome.status === "fulfilled").map((outcome) => Number(outcome.value));
  return { values, error: failed ? failed.reason.message : null };
}

const provider = new JsonRpcProvider(url, 1, { staticNetwork: true });
const ethers = await counted((address) => provider.getBalance(address));
provider.destroy();

const batch = size ? { batchSize: Number(size) } : true;
const client = createPublicClient({ transport: http(url, { batch, retryCount: 0 }) });
const viem = await counted((address) => client.getBalance({ address }));

console.log(JSON.stringify({ ethers, viem }));
