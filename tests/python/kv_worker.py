"""A rank whose KV cache contains the tokens themselves, and whose next token is a function of the
cache alone: a text is right only if all blocks are."""

import coxswain

BLOCK_SIZE = 16


def next_token(history):
    return 3 + (sum(history) * 31 + len(history)) % 11


def main():
    worker = coxswain.Worker()
    transfer = coxswain.KvTransfer(worker)
    layout = coxswain.KvLayout(
        layer_count=1,
        kv_head_first=0,
        kv_head_count=1,
        head_dim=1,
        block_size=BLOCK_SIZE,
        element_bytes=4,
        model_digest=7,
    )
    blocks = coxswain.KvBlocks(64, BLOCK_SIZE * 4)

    @worker.init
    def init(_):
        return coxswain.InitResult(
            64, BLOCK_SIZE, max_positions=64, kv_pool=transfer.open(blocks, layout)
        )

    @worker.execute
    def execute(batch):
        cells, table, replies = blocks.memory.cast("i"), batch.block_table(), []
        with transfer.step(batch):
            for row in range(batch.row_count):

                def cell(position, row=row):
                    return table[row, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

                for i in range(batch.starts[row], batch.starts[row + 1]):
                    cells[cell(batch.positions[i])] = batch.tokens[i]
                history = [cells[cell(position)] for position in range(batch.positions[i] + 1)]
                replies.append(next_token(history) if batch.emits[row] else -1)
        return replies

    worker.cleanup(transfer.forget)
    worker.serve()


if __name__ == "__main__":
    main()
