"""A process that owns a cluster, for a test that kills it: ``python owner.py ADDRESS``."""

import asyncio
import sys

from cluster.harness import cluster


async def main(address: str) -> None:
    async with cluster(2, cluster_address=address):
        print("serving", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
