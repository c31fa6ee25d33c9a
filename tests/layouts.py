"""Layouts of caches, by what each group of layers sees."""

from aioengine.scheduler.cache_layout import STATE_REACH, CacheGroup, CacheLayout, CachePool, StateSpec

STATE = "state"


def layout_of(*groups: int | str | None, block_bytes: int = 0) -> CacheLayout:
    """A group of one layer for each of these: a window, None for all tokens, or `STATE`, which come last.

    Attention shares a pool, states have another.
    """
    is_mixed = STATE in groups and groups[0] != STATE
    made = [
        CacheGroup(layers=(layer,), reach=STATE_REACH, is_state=True, pool=int(is_mixed))
        if kind == STATE
        else CacheGroup(layers=(layer,), reach=kind)  # type: ignore[arg-type]
        for layer, kind in enumerate(groups)
    ]
    pools = [CachePool(block_bytes=block_bytes)] if groups[0] != STATE else []
    pools += [CachePool(spec=StateSpec(num_bytes=1), block_bytes=block_bytes)] if STATE in groups else []
    return CacheLayout(groups=tuple(made), pools=tuple(pools))
