"""The index: a tree of content nodes, in which a hit is proven by comparison, unit after unit.

A node is reached from its parent by key and then compared (parent, tokens, extras), so equality of a whole
history follows by induction and the hash function need not be trusted: with one that always returns 7 the
answers stay right and only speed suffers.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.cache.block import Holding, Node, Root
from headwater.cache.events import BlockStored, EventLog, is_apart
from headwater.cache.evict import Eviction, Ghosts
from headwater.cache.group import GroupLayout, Layout
from headwater.cache.key import TokenChain
from headwater.cache.pool import BlockPool
from headwater.cache.senders import Senders
from headwater.errors import AuditError
from headwater.types import BlockId, Namespace

Family = tuple[bytes, str | None]
"""Weights and salt: the namespaces that differ only in their adapters."""


class PrefixIndex:
    """Content nodes of all namespaces, with the blocks of ``pool`` that hold them."""

    def __init__(self, layout: Layout, pool: BlockPool, events: EventLog, max_ghosts: int) -> None:
        self.layout = layout
        self.pool = pool
        self.events = events
        self.ghosts = Ghosts(max_ghosts)
        self.senders = Senders()
        self.roots: dict[Namespace, Root] = {}
        self.by_key: dict[bytes, Node] = {}
        """Nodes by key (roots are found by namespace); equal keys are linked by ``alias``."""
        self.computing: dict[Node, list[Holding]] = {}
        """Holdings by cursor: each computes the units after it, as far as its chain knows their tokens."""
        self.first_units: dict[Family, dict[bytes, dict[Node, None]]] = {}
        """Per family and tokens: nodes of first units, to tell "other adapter" from "no record"."""
        self.partly: dict[Node, dict[int, Eviction]] = {}
        """Nodes that have lost all copies of a group but not of all groups: per group, the eviction."""
        self.epoch = 0
        """Counts withdrawals: a look-up of the same epoch is still right."""
        self.ending_at = layout.ending_at()

    # -- finding ------------------------------------------------------------------------------------------

    def root_of(self, chain: TokenChain) -> Root | None:
        return self.roots.get(chain.namespace)

    def is_attached(self, node: Node) -> bool:
        """Whether ``node`` (no root) is still in the tree."""
        return node.parent is not None

    def walk(self, chain: TokenChain, n_units: int) -> list[Node]:
        """The proven nodes of the chain's first units, at most ``n_units``, up to the first that is unknown."""
        path: list[Node] = []
        node: Node | None = self.root_of(chain)
        if node is None or not n_units:
            return path
        keys, chunks, find = chain.keys(n_units), chain.chunks(n_units), self.by_key.get
        plain = chain.plain
        for i in range(n_units):
            child = find(keys[i])
            if child is None:
                break
            tokens = chunks[i]
            extras = None if plain else chain.extras(i)
            if child.parent is not node or child.tokens != tokens or child.extras != extras:
                child = self._among_aliases(child, node, tokens, extras)
                if child is None:
                    break
            path.append(child)
            node = child
        return path

    @staticmethod
    def _among_aliases(first: Node, parent: Node, tokens: bytes, extras: bytes | None) -> Node | None:
        node: Node | None = first
        while node is not None:
            if node.parent is parent and node.tokens == tokens and node.extras == extras:
                return node
            node = node.alias
        return None

    def computing_now(self, parent: Node | None, chain: TokenChain, i: int) -> Holding | None:
        """Who is computing the chain's unit ``i`` after ``parent`` now, by comparison; None if nobody is."""
        if parent is None:
            return None
        for holding in self.computing.get(parent, ()):
            other = holding.chain
            if other is not chain and i < other.n_units and other.same_unit(chain, i):
                return holding
        return None

    def known_elsewhere(self, chain: TokenChain) -> bool:
        """Whether the chain's first tokens are recorded under other adapters (never another salt) or media."""
        family = self.first_units.get(_family(chain.namespace), {})
        return chain.chunk(0) in family

    # -- publishing ---------------------------------------------------------------------------------------

    def enter(self, holding: Holding, node: Node) -> None:
        """``holding`` computes what follows ``node``."""
        holding.cursor = node
        self.computing.setdefault(node, []).append(holding)

    def leave(self, holding: Holding) -> None:
        """``holding`` computes nothing more; records that only it kept go."""
        node = holding.cursor
        if node is None:
            return
        self._forget_cursor(holding, node)
        self._prune(node)

    def _forget_cursor(self, holding: Holding, node: Node) -> None:
        holding.cursor = None
        others = self.computing[node]
        others.remove(holding)
        if not others:
            del self.computing[node]

    def ensure_root(self, chain: TokenChain) -> Root:
        root = self.roots.get(chain.namespace)
        if root is None:
            root = self.roots[chain.namespace] = Root(chain.root)
        return root

    def publish(self, holding: Holding, n_units: int) -> None:
        """Make the holding's blocks up to unit ``n_units`` findable, from its cursor on."""
        chain, start = holding.chain, holding.n_published // self.layout.unit
        node = holding.cursor
        if node is None or n_units <= start:
            return
        path = self._find_or_add(node, chain, start, n_units)
        for group in self.layout.reusable:
            self._add_copies(group, holding, path, start)
        if not self.layout.every_unit_held:
            self._note_ghosts(path)
        if holding.sender:
            self.senders.note(path, holding.sender)
        holding.n_published = n_units * self.layout.unit
        self._forget_cursor(holding, node)
        self.enter(holding, path[-1])
        self.trim()

    def _find_or_add(self, node: Node, chain: TokenChain, start: int, end: int) -> list[Node]:
        """Nodes of the chain's units ``start .. end - 1`` after ``node``; those that are unknown are added."""
        keys, chunks, plain = chain.keys(end), chain.chunks(end), chain.plain
        by_key, path = self.by_key, []
        for i in range(start, end):
            key, tokens, extras = keys[i], chunks[i], None if plain else chain.extras(i)
            first = by_key.get(key)
            child = None if first is None else self._among_aliases(first, node, tokens, extras)
            if child is None:
                child = Node(node, key, tokens, extras, i + 1)
                child.alias = first
                by_key[key] = child
                if i and node.child is None and node.siblings is None:
                    node.child = child
                else:
                    self._add_child(node, child)
            path.append(child)
            node = child
        return path

    def _add_child(self, parent: Node, node: Node) -> None:
        parent.add_child(node)
        if isinstance(parent, Root):
            family = self.first_units.setdefault(_family(parent.identity.namespace), {})
            family.setdefault(node.tokens, {})[node] = None

    def _add_copies(self, group: GroupLayout, holding: Holding, path: Sequence[Node], start: int) -> None:
        """Every block of ``group`` that ends in ``path`` (units from ``start`` on) becomes a copy of its node."""
        table, ratio = holding.tables[group.index], group.ratio
        nodes, single, ghosts, announce = self.pool.node, self.pool.single, self.ghosts.nodes, self.events.enabled
        root = holding.chain.root
        # Blocks before table.first slid out before they were published.
        first = max(start // ratio, table.first)
        ends = path[(first + 1) * ratio - 1 - start :: ratio]
        blocks = table.blocks[first - table.first : first - table.first + len(ends)]
        for node, block in zip(ends, blocks, strict=True):
            nodes[block] = node
            copies = node.copies
            if announce and not any(self.pool.group[copy] == group.index for copy in copies):
                self.events.stored(node.key, self._block_content(node, group), group.index, root)
            if copies:
                node.copies = (*copies, block)
                self._free_surplus(node, group)
                if node in self.partly:
                    self._held_again(node, group.index)
            else:
                node.copies = single[block]
                if node in ghosts:
                    del ghosts[node]

    def _held_again(self, node: Node, group: int) -> None:
        evictions = self.partly[node]
        evictions.pop(group, None)
        if not evictions:
            del self.partly[node]

    def _free_surplus(self, node: Node, group: GroupLayout) -> None:
        """A copy in use was just added: it stands for the content, and the idle ones are free. They would go first
        anyway, but until the pool is full one would be left by every request that computes this content again."""
        pool = self.pool
        surplus = [block for block in node.copies if pool.group[block] == group.index and not pool.refs[block]]
        if surplus:
            self.epoch += 1
            node.copies = tuple(block for block in node.copies if block not in surplus)
            for block in surplus:
                pool.unpublish(block)

    def _note_ghosts(self, path: Sequence[Node]) -> None:
        """New nodes whose blocks slid out before they were published are ghosts from the start."""
        ghosts, ending_at = self.ghosts.nodes, self.ending_at
        for node in path:
            if not node.copies and node not in ghosts and ending_at[(node.depth - 1) % len(ending_at)]:
                ghosts[node] = None

    @staticmethod
    def _block_content(node: Node, group: GroupLayout) -> tuple[bytes, bytes, bytes]:
        """Of the group's block that ends at ``node``: the key of the block before it, its tokens and its extras."""
        tokens, extras, at = b"", b"", node
        for _ in range(group.ratio):
            if at.parent is not None:
                tokens, extras, at = at.tokens + tokens, (at.extras or b"") + extras, at.parent
        return at.key, tokens, extras

    def snapshot(self) -> list[BlockStored]:
        """Everything findable now, parents before children, one branch after the other."""
        found: list[BlockStored] = []
        sequence, group_of = self.events.next_sequence, self.pool.group
        groups = {group.index: group for group in self.layout.reusable}
        for root in self.roots.values():
            digest, apart = root.identity.digest, is_apart(root.identity)
            nodes = root.children()
            while nodes:
                node = nodes.pop()
                nodes += node.children()
                for index in {group_of[block] for block in node.copies}:
                    parent, chunk, extras = self._block_content(node, groups[index])
                    found.append(BlockStored(sequence, node.key, parent, chunk, index, digest, apart, extras))
        return found

    # -- forgetting ---------------------------------------------------------------------------------------

    def evict(self, blocks: Sequence[BlockId], eviction: Eviction) -> None:
        """Withdraw blocks that were taken from the queue, before they get new content."""
        if not blocks:
            return
        self.epoch += 1
        nodes, ghosts, quiet = self.pool.node, self.ghosts.nodes, not self.events.enabled
        for block in blocks:
            node = nodes[block]
            nodes[block] = None
            if node is None:
                continue
            if quiet and len(node.copies) == 1:
                node.copies = ()
                ghosts[node] = eviction
                self.partly.pop(node, None)
                continue
            self._remove_copy(node, block)
            group = self.pool.group[block]
            if not node.copies:
                ghosts[node] = eviction
                self.partly.pop(node, None)
            elif not any(self.pool.group[copy] == group for copy in node.copies):
                self.partly.setdefault(node, {})[group] = eviction
        self.trim()

    def _remove_copy(self, node: Node, block: BlockId) -> None:
        group = self.pool.group
        node.copies = tuple(copy for copy in node.copies if copy != block)
        if self.events.enabled and not any(group[copy] == group[block] for copy in node.copies):
            self.events.removed(node.key, group[block])

    def trim(self) -> None:
        """Drop the oldest ghosts above the limit, each with what can no longer be reached without it."""
        ghosts = self.ghosts
        while len(ghosts.nodes) > ghosts.limit:
            self._drop(ghosts.oldest)

    def _drop(self, top: Node) -> None:
        parent = top.parent
        if parent is None:
            raise AuditError("a ghost is not in the tree")
        parent.remove_child(top)
        self.epoch += 1
        if top.child is None and top.siblings is None:  # nearly always: tails are evicted before heads
            self._forget(top)
        else:
            nodes = [top]
            while nodes:
                node = nodes.pop()
                nodes += node.children()
                self._forget(node)
        if not (parent.copies or parent.has_children):
            self._prune(parent)

    def withdraw(self, node: Node) -> int:
        """Drop ``node`` and all that follows it, and let nothing be published that may rest on them: by who holds
        such a block, or may have copied from it (who computes what follows its parent). The number of blocks."""
        if node.parent is None:
            return 0
        barred = list(self.computing.get(node.parent, ()))
        n_blocks, todo = 0, [node]
        while todo:
            at = todo.pop()
            todo += at.children()
            n_blocks += len(at.copies)
            barred += self.computing.get(at, ())
        for holding in barred:
            holding.barred = True
            if holding.cursor is not None:
                self._forget_cursor(holding, holding.cursor)
        self._drop(node)
        return n_blocks

    def _forget(self, node: Node) -> None:
        """Take one node out of every record. Blocks in use stay with their owners, unpublished."""
        self._unlink(node)
        self.ghosts.nodes.pop(node, None)
        self.partly.pop(node, None)
        for block in node.copies:
            self._remove_copy(node, block)
            self.pool.unpublish(block)
        if node in self.computing:
            for holding in self.computing.pop(node):
                holding.cursor = None
        node.parent = node.child = node.siblings = None

    def _unlink(self, node: Node) -> None:
        first = self.by_key.pop(node.key)
        if first is node:
            if node.alias is not None:
                self.by_key[node.key] = node.alias
        else:
            self.by_key[node.key] = first
            while first.alias is not node and first.alias is not None:
                first = first.alias
            first.alias = node.alias
        if isinstance(node.parent, Root):
            kind = _family(node.parent.identity.namespace)
            family = self.first_units[kind]
            del family[node.tokens][node]
            if not family[node.tokens]:
                del family[node.tokens]
            if not family:
                del self.first_units[kind]

    def _prune(self, node: Node) -> None:
        """Drop ``node`` and then its parents as long as nothing is left that they lead to."""
        while not (node.has_children or node.copies or node in self.ghosts.nodes or node in self.computing):
            if isinstance(node, Root):
                del self.roots[node.identity.namespace]
                return
            parent = node.parent
            if parent is None:
                return
            parent.remove_child(node)
            self._forget(node)
            node = parent

    def clear(self) -> None:
        """Forget everything. The caller has made sure that no block is in use."""
        for holdings in self.computing.values():
            for holding in holdings:
                holding.cursor = None
        for first in self.by_key.values():
            node: Node | None = first
            while node is not None:  # a look-up made before must find its path cut off
                node.parent = node.child = node.siblings = None
                node.copies = ()
                node = node.alias
        for held in (self.computing, self.roots, self.by_key, self.first_units, self.ghosts.nodes, self.partly):
            held.clear()
        self.epoch += 1


def _family(namespace: Namespace) -> Family:
    return namespace.weights, namespace.salt
