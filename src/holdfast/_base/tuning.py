"""The numbers that speed depends on, each with its reason. ``docs/performance.md`` says what they were measured with.

They are not for users to turn: those find their knobs in ``holdfast._settings`` and in the arguments of the calls.
"""

from __future__ import annotations

KIB, MIB = 1 << 10, 1 << 20

MEMORY_BUDGET = 64 * MIB
"""What a save, a load or a conversion may allocate beyond the state, unless the caller says otherwise. More does not
make them faster."""

SMALLEST_BUDGET = 256 * KIB
"""What callers may set it to: four digest blocks, for a buffer and what a part of a tensor is converted in."""

# --- writing ---

WRITE_BUFFER_BYTES = 8 * MIB
"""A direct write, or a part of an object. Disks reach their full speed from some 4 MiB on; a larger one would only
delay the first."""

CACHED_WRITE_BYTES = MIB
"""A write to the page cache: what was put together for it is still in the processor's cache when it is copied. Writes
of 2 MiB and more have Linux look for pages of that size, which can take longer than all the rest."""

WRITE_BACK_BYTES = 4 * MIB
"""What the system is told at once to write from the page cache to the disk."""

LEFT_IN_PAGE_CACHE = 32 * MIB
"""What a file that is being written takes of the page cache: enough for the disk to be busy, and so little that the
same memory is used again and again. To find more can cost several times as much as to fill it: where others must give
it up for that, and on virtual machines that have never used it."""

NOTED_WRITE_BYTES = 16 * MIB
"""Files of so many bytes show how fast a disk is. Of smaller ones the calls cost more than the bytes."""

NOTED_WRITES = 3
"""The fastest of so many files shows how fast a way of writing is: others may have been slowed down by something else,
as the first one of a program often is."""

FIRST_TRY_AGAIN = 8
TRY_AGAIN_AFTER = 50
"""Files that are written to a disk before the slower way is tried again: at first, and at most later."""

WRITERS = 2
"""Direct writes under way at once. One leaves the disk idle between two writes; more than two gain nothing."""

UPLOADS = 3
"""Parts of an object that are on their way to an object store at once, with another one being filled: what a half of
the memory budget allows. Each connection is slow, and all together are not."""

SMALLEST_BUFFER = 64 * KIB
"""However small the memory budget is: below that, calls cost more than the bytes."""

DIRECT_FROM = MIB
"""Smaller files are always written and read through the page cache."""

DIRECT_ALIGNMENT = 4 * KIB
"""Of memory, positions and lengths of direct reads and writes. Disks with larger sectors refuse, and are served through
the page cache."""

PIECE_BYTES = 4 * MIB
"""Elements that are stored otherwise than they are in memory (transposed, in another dtype, on a device) are copied so
many bytes at a time: what is made of them is still in the processor's cache when it is digested."""

SHARE_OF_WRITE_BUFFERS, SHARE_OF_A_PIECE = 2, 16
"""Of the memory budget, a half is for write buffers and a sixteenth for a piece, of which a conversion makes several
copies. The rest is left to Python's objects."""

SMALLEST_SHARE = 4 * MIB
"""What several ranks have of a tensor is divided among them in parts that are not smaller, to be written: below that, a
write costs more than its bytes."""

SMALL_TENSOR = 64 * KIB
"""Up to here the work for each tensor counts and not its bytes, so that small ones have a path of their own. Copies on
it keep Python's lock, which more bytes would do for too long."""

ENTRIES_AT_ONCE = 2000
"""Entries that are encoded as JSON in one go, which takes a millisecond or two. Python lets no other thread run
meanwhile."""

RECORDS_AT_ONCE = 500
"""Of lists and dicts of objects that travel between ranks: what is pickled in one go. The same, for what takes longer
than JSON does."""

COLUMNS_FROM = 32
"""Lists and dicts of so many records travel as columns. With fewer, pickle alone is as fast."""

FREED_AT_ONCE = 500
"""Objects, with all that they are made of: a fraction of a millisecond."""

STREAM_BYTES = MIB
"""What is taken of a stream at once, or handed to one: still in the processor's cache when its CRC is taken."""

SHORT_WRITE = 256 * MIB
"""A file of fewer bytes is written in a moment, during which Python's collector rests: it would mostly look at what is
being written."""

# --- reading ---

READERS = 4
"""Threads that read, at most. What comes from the page cache is read by no more than there are processors; with what
comes from a disk, more requests under way help."""

RANKS_OF_A_MACHINE = 4
"""That share its processors, if whoever started them does not say."""

SEVERAL_READERS_FROM = 32 * MIB
"""Less is not worth starting threads for."""

READ_BYTES = 4 * MIB
"""What one reader asks a disk for at once."""

REMOTE_START_BYTES = 64 * KIB
"""What the first request for an object of a store at a URL brings along. It takes no longer than to ask for its size,
and the records of most checkpoints are smaller."""

REMOTE_READ_BYTES = 16 * MIB
"""What one request asks an object store for. Larger reads become several requests at once. Each costs some
milliseconds, and a server may have to do something with all of an object to give out a part of it."""

REMOTE_BUFFERED_BYTES = 8 * MIB
"""What small things in an object store are read together in. It is copied from there, so that memory limits it."""

CACHED_READ_BYTES = 512 * KIB
"""What is taken from the page cache at once: it is still in the processor's own cache when its digest is taken, which
is a quarter faster than with 4 MiB."""

MERGE_GAP = 64 * KIB
"""Two ranges that are closer than that are read as one: a request costs more than so many bytes."""

STRAIGHT_FROM = 256 * KIB
"""So many bytes are worth a read of their own, straight to where they belong. Neighbours of fewer are read together,
and copied."""

LARGEST_BUFFERED_READS = 4
"""So many times as large as wished for a buffered read can become, where things overlap."""

MEMORY_OF_A_READER = 2
"""So many times what it reads at once: files may need aligned memory, and buffered reads can be larger than wished."""

READS_UNDER_WAY = 2 * READERS
"""Where one thread finishes in order what others have read: so many are begun before the first has to be done, so that
no reader waits for it."""

QUANTIZED_ELEMENTS = MIB
"""Weights that are brought to their full precision at a time: 4 MiB of them, which the processor's cache can hold."""

DELIVERY_BYTES = 16 * MIB
"""What one rank that reads for all sends at a time. Each rank needs so much memory; less would be more messages."""

SHARED_PART_BYTES = 4 * MIB
"""What a rank that reads for others reads and sends at a time. Less would read more digest blocks twice, more would
take more memory on those that receive it."""

SMALLEST_SHARED_READ = 8 * MIB
"""So many bytes that several ranks want are worth one more reader: each reads digest blocks that another one reads too,
which is a hundredth of that."""

MOST_WANTED_BYTES = 32 * MIB
"""Of lists of what ranks want, those that are the same counted once: with more, ranks read for those of their group
only. It is some 300 ranks that all want other parts of 2,000 tensors; more would plan for longer than they read."""

SMALLEST_CUT = 256 * KIB
"""Where a tensor is cut, a digest block is read by two ranks. So neither part is smaller than that."""

COMPARED_BYTES = 16 * MIB
"""What is read at once of tensors that are only compared with the state. Less would start readers too often."""

COUNTED_ELEMENTS = 64 * KIB
"""Elements that statistics and comparisons count with at a time: as wide numbers they still fit into the processor's
cache, where the dozen passes over them cost next to nothing."""

COUNTED_ELEMENT_BYTES = 32
"""What memory an element of a lot takes at most while it is counted: its bits in two checkpoints."""

COUNTED_TOGETHER = 512
"""Small tensors that are read together to be counted."""

VERIFIED_BYTES, VERIFIED_TOGETHER = 64 * MIB, 10_000
"""Items of DCP and safetensors files that are verified together, so that files are not opened for each. If one is
damaged, each of them is looked at alone."""

STOCK_BATCH_BYTES = 1024 * MIB
"""Of tensors that a planner of stock DCP is asked for together. They are its state, as a rule, so that this takes no
memory; several readers want much to do."""

COPY_AT_ONCE = 16 * MIB
"""What a thread copies of a state at once. A step of an optimizer that has to wait takes over what is left, in parts of
this size."""
