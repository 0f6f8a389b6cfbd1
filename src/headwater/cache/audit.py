"""Every invariant of the cache, stated in code. A failure is a bug in Headwater, never a caller's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from headwater.cache.block import Holding, Node, Root
from headwater.cache.key import unit_key
from headwater.cache.senders import MAX_SENDERS
from headwater.errors import AuditError

if TYPE_CHECKING:
    from headwater.cache.prefix import PrefixCache


def audit(cache: PrefixCache, holdings: Iterable[Holding] = ()) -> None:
    """Check every invariant; AuditError says which does not hold.

    ``holdings``: what the caller believes to be alive; each must be known to the cache, and all of them if
    any is given. Costs a step per block, node and table entry: for tests and idle self-checks.
    """
    given = list(holdings)
    live = cache.live
    _check(len(set(map(id, given))) == len(given), "a holding is listed twice")
    for holding in given:
        _check(holding in live, f"{holding} is not known to the cache")
    _check(not given or len(given) == len(live), f"{len(live)} holdings are alive, the caller knows {len(given)}")
    _audit_pool(cache)
    nodes = _audit_tree(cache)
    _audit_copies(cache, nodes)
    _audit_ghosts(cache, nodes)
    _audit_holdings(cache, nodes)
    _audit_beginnings(cache)
    _audit_events(cache, nodes)


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AuditError(otherwise)


def _audit_pool(cache: PrefixCache) -> None:
    """in use + evictable + free = all, and references = table entries + sources of copies to come + fences."""
    pool = cache.pool
    free = set(pool.free)
    _check(len(free) == len(pool.free), "a block is free twice")
    _check(free >= set(range(pool.n_used_ever, pool.n_blocks)), "a block is used that counts as never used")
    _check(not free & pool.evictable.keys(), "a block is both free and evictable")
    for block in range(pool.n_blocks):
        refs, published = pool.refs[block], pool.node[block] is not None
        _check(refs >= 0, f"block {block} has {refs} references")
        _check((block in free) == (refs == 0 and not published), f"block {block}: free list disagrees with its state")
        _check((block in pool.evictable) == (refs == 0 and published), f"block {block}: queue disagrees with its state")
    in_use = sum(refs > 0 for refs in pool.refs)
    _check(in_use + len(pool.evictable) + len(free) == pool.n_blocks, "in use + evictable + free is not all")
    fenced: Counter[int] = Counter()
    for blocks in pool.fences.values():
        fenced.update(blocks)
    _check(dict(fenced) == pool.fence_refs, "fence references disagree with the fences")
    held = Counter(fenced)
    for holding in cache.live:
        for index, table in enumerate(holding.tables):
            _check(len(set(table.blocks)) == len(table.blocks), f"{holding}: a block is in a table twice")
            for block in table.blocks:
                _check(pool.group[block] == index, f"{holding}: block {block} belongs to group {pool.group[block]}")
                _check(block not in pool.evictable, f"{holding}: block {block} is evictable")
                _check(block not in free, f"{holding}: block {block} is free")
            held.update(table.blocks)
        held.update(beginning.source for beginning in holding.beginnings)
    for block in range(pool.n_blocks):
        _check(pool.refs[block] == held[block], f"block {block}: {pool.refs[block]} references, {held[block]} holders")


def _audit_tree(cache: PrefixCache) -> dict[Node, Root]:
    """Links agree in both directions, keys are what content says, and the key table holds exactly the tree."""
    index = cache.index
    nodes: dict[Node, Root] = {}
    for namespace, root in index.roots.items():
        _check(root.identity.namespace == namespace and root.parent is None, "a root stands under another namespace")
        _check(root.has_children or root in index.computing, "a root with nothing left was kept")
        todo: list[Node] = [root]
        while todo:
            node = todo.pop()
            children = node.children()
            _check(node.siblings is None or (len(children) > 1 and node.child is None), "children: two or more, or one")
            order = [(child.tokens, child.extras or b"") for child in children]
            _check(order == sorted(set(order)), "siblings are out of order or equal")
            for child in children:
                _check(child.parent is node and child.depth == node.depth + 1, "a child names another parent")
                _check(len(child.tokens) == 4 * cache.unit, "a node holds no full unit")
                key = unit_key(cache.hasher, node.key, child.tokens, child.extras)
                _check(child.key == key, "a node's key is not that of its content")
                unknown = child.senders - node.senders if node.parent is not None else frozenset()
                full = len(node.senders) == MAX_SENDERS
                _check(full or not unknown, "somebody sent a node but not what leads to it")
                nodes[child] = root
            todo += children
    bucketed: list[Node] = []
    for key, first in index.by_key.items():
        at: Node | None = first
        while at is not None:
            _check(at.key == key, "a node is in the bucket of another key")
            bucketed.append(at)
            at = at.alias
    _check(len(bucketed) == len(nodes) and set(bucketed) == set(nodes), "the key table is not the tree")
    first_units = {
        (kind, tokens, node)
        for kind, family in index.first_units.items()
        for tokens, of in family.items()
        for node in of
    }
    expected = set()
    for node, root in nodes.items():
        if node.depth == 1:
            namespace = root.identity.namespace
            expected.add(((namespace.weights, namespace.salt), node.tokens, node))
    _check(first_units == expected, "the record of first units is not that of the tree")
    return nodes


def _audit_copies(cache: PrefixCache, nodes: dict[Node, Root]) -> None:
    """Each published copy leads to a node that names it, where a block of its group ends."""
    pool, index = cache.pool, cache.index
    for block, node in enumerate(pool.node):
        if node is not None:
            _check(node in nodes, f"block {block} is published as content that cannot be reached")
            _check(block in node.copies, f"block {block} is not a copy of what it is published as")
            ending = index.ending_at[(node.depth - 1) % len(index.ending_at)]
            _check(pool.group[block] in {g.index for g in ending}, f"block {block}: no block of its group ends there")
    for node in nodes:
        _check(len(set(node.copies)) == len(node.copies), "a copy is listed twice")
        for block in node.copies:
            _check(pool.node[block] is node, f"block {block} is listed as a copy of what it does not hold")


def _audit_ghosts(cache: PrefixCache, nodes: dict[Node, Root]) -> None:
    """Ghosts are the nodes that could have copies and have none; bounded. Nodes between blocks lead somewhere."""
    index = cache.index
    ghosts = index.ghosts.nodes
    for node in nodes:
        bears = bool(index.ending_at[(node.depth - 1) % len(index.ending_at)])
        _check((node in ghosts) == (bears and not node.copies), "the ghosts are not the nodes without copies")
        _check(bears or node.has_children or node in index.computing, "a node between blocks leads nowhere")
    _check(all(node in nodes for node in ghosts), "a ghost cannot be reached")
    _check(len(ghosts) <= index.ghosts.limit, f"{len(ghosts)} ghosts, {index.ghosts.limit} allowed")
    for node, evictions in index.partly.items():
        held = {cache.pool.group[block] for block in node.copies}
        _check(node in nodes and bool(held), "a partly evicted node cannot be reached, or has no copies")
        _check(bool(evictions) and not held & evictions.keys(), "a group is held and remembered as evicted")


def _audit_holdings(cache: PrefixCache, nodes: dict[Node, Root]) -> None:
    """Cursors, and that the published blocks of a table hold the tokens of its sequence."""
    index, pool, unit = cache.index, cache.pool, cache.unit
    listed = [(node, holding) for node, at in index.computing.items() for holding in at]
    cursors = [(holding.cursor, holding) for holding in cache.live if holding.cursor is not None]
    _check(len(listed) == len(cursors) and set(listed) == set(cursors), "the register of computing requests is wrong")
    for holding in cache.live:
        _check(not holding.released, f"{holding} is alive and released")
        _check(len(holding.tables) == len(cache.groups), f"{holding} has {len(holding.tables)} tables")
        proven: set[Node] = set()
        if holding.cursor is not None:
            _check(holding.cursor.depth * unit == holding.n_published, f"{holding}: its cursor is elsewhere")
            root = nodes.get(holding.cursor) or holding.cursor
            _check(index.roots.get(holding.chain.namespace) is root, f"{holding}: its cursor is in another namespace")
        for group in index.layout.reusable:
            table = holding.tables[group.index]
            for j, block in enumerate(table.blocks, table.first):
                node = pool.node[block]
                if node is None:
                    continue
                _check(node.depth == (j + 1) * group.ratio, f"{holding}: block {block} was published for another place")
                same = _is_history(node, holding, index.roots.get(holding.chain.namespace), proven)
                _check(same, f"{holding}: block {block} is published with tokens it does not hold")
    n_logical = sum(holding.n_blocks for holding in cache.live)
    _check(cache.n_logical == n_logical, f"{cache.n_logical} table entries counted, {n_logical} found")


def _audit_beginnings(cache: PrefixCache) -> None:
    """What is still to be copied is published, begins with the sequence's own tokens, and goes to its own blocks."""
    index, pool = cache.index, cache.pool
    for holding in cache.live:
        for beginning in holding.beginnings:
            source, spec = beginning.source, cache.groups[beginning.group]
            start = beginning.block * spec.block_size
            where = f"{holding}: the source {source} of a copy"
            _check(pool.group[source] == beginning.group, f"{where} belongs to group {pool.group[source]}")
            _check(0 < beginning.n_slots <= spec.block_size, f"{where} gives {beginning.n_slots} slots")
            table = holding.tables[beginning.group]
            _check(beginning.block >= table.first, f"{where} goes to a block that slid out")
            for target in table.blocks[beginning.block - table.first :][:1]:
                _check(target != source and pool.refs[target] == 1, f"{where} goes to block {target}, which others use")
                _check(pool.node[target] is None, f"{where} goes to block {target}, which is published")
            if pool.node[source] is None:  # its record was dropped meanwhile; its slots stay as they are
                continue
            _check(pool.node[source] is beginning.node, f"{where} was published anew")
            history, at = b"", beginning.node
            while at.parent is not None:
                history, at = at.tokens + history, at.parent
            _check(at is index.roots.get(holding.chain.namespace), f"{where} is in another namespace")
            _check(len(history) == 4 * (start + spec.block_size), f"{where} holds another place")
            n_same = start + beginning.n_slots
            own = b"".join(holding.chain.beginning(i)[0] for i in range(-(-n_same // cache.unit)))
            _check(history[: 4 * n_same] == own[: 4 * n_same], f"{where} holds other tokens")


def _is_history(node: Node, holding: Holding, root: Root | None, proven: set[Node]) -> bool:
    """Whether the path to ``node`` spells the holding's own tokens; ``proven`` nodes are not walked again."""
    chain, at = holding.chain, node
    walked = []
    while at not in proven and at is not root:
        i = at.depth - 1
        if at.parent is None or at.tokens != chain.chunk(i) or at.extras != chain.extras(i):
            return False
        walked.append(at)
        at = at.parent
    proven.update(walked)
    return True


def _audit_events(cache: PrefixCache, nodes: dict[Node, Root]) -> None:
    """A reader of all events holds exactly the keys that the index can find."""
    if cache.events.enabled:
        found = {(cache.pool.group[block], node.key) for node in nodes for block in node.copies}
        _check(found == cache.events.announced, "the announced keys are not the index's")
