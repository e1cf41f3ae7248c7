"""Many calls in one message, from a script: `python examples/batch_client.py [URL]`.

Without a URL it starts examples/shop.py as a child process and talks to it over stdin and stdout.
"""

import sys
from pathlib import Path

from wirecall import connect_sync

SHOP = Path(__file__).parent / "shop.py"


def main() -> None:
    target = sys.argv[1] if len(sys.argv) > 1 else [sys.executable, str(SHOP)]
    with connect_sync(target) as client:
        with client.batch() as batch:
            prices = {sku: batch.call("price", {"sku": sku}) for sku in ("tea", "coffee", "milk")}
            charge = batch.call("charge", {"order": "7", "cents": 1150})
        for sku, entry in prices.items():
            print(f"{sku:8} {entry.result() if entry.ok else entry.error}")
        print(f"charge   {charge.result()}")
        print(f"sent as  {batch.wire}: {batch.reason}")


if __name__ == "__main__":
    main()
