import pytest

from lit_rl.tasks.batches import EpochBatches, OrderedBatches


def test_an_epoch_holds_every_row_once_and_epochs_differ():
    sampler = EpochBatches(12, batch_size=4, seed=0)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
        assert len(epochs[-1]) == len(sampler) == 3
        assert sorted(row for batch in epochs[-1] for row in batch) == list(range(12))
    assert epochs[0] != epochs[1] != epochs[2]
    again = EpochBatches(12, batch_size=4, seed=0)
    again.set_epoch(1)
    assert list(again) == epochs[1]
    assert list(EpochBatches(12, batch_size=4, seed=1)) != epochs[0]


def test_rows_that_do_not_fill_a_batch_wait():
    sampler = EpochBatches(11, batch_size=4, seed=0)
    assert [len(batch) for batch in sampler] == [4, 4]
    assert len(sampler) == 2


def test_ranks_share_the_batches_of_a_single_process():
    whole = list(EpochBatches(12, batch_size=4, seed=0))
    ranks = [list(EpochBatches(12, 4, 0, rank=r, world_size=2)) for r in range(2)]
    for batch, *parts in zip(whole, *ranks, strict=True):
        assert [part for pair in zip(*parts, strict=True) for part in pair] == batch


def test_an_epoch_continues_where_it_was_left():
    whole = list(EpochBatches(12, batch_size=4, seed=0))
    sampler = EpochBatches(12, batch_size=4, seed=0)
    sampler.resume(epoch=0, first_batch=1)
    # Lightning announces the epoch, which is already under way.
    sampler.set_epoch(0)
    assert list(sampler) == whole[1:]


@pytest.mark.parametrize("num_rows", [4, 7, 8, 9, 200])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_held_out_rows_stand_once_over_the_ranks_in_equally_many_batches(num_rows, world_size):
    ranks = [list(OrderedBatches(num_rows, 8, rank, world_size)) for rank in range(world_size)]
    assert sorted(row for rank in ranks for batch in rank for row in batch) == list(range(num_rows))
    assert len({len(batches) for batches in ranks}) == 1
    for batches in zip(*ranks, strict=True):
        assert all(batches)
        assert sum(map(len, batches)) <= 8


def test_fewer_held_out_rows_than_ranks_are_refused():
    with pytest.raises(ValueError, match=r"3 held-out prompts in 1 batches .* 8 leave .* 4 ranks"):
        OrderedBatches(3, 8, rank=0, world_size=4)
