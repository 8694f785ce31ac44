// Attention of prompts and of single tokens over the KV cache.
//
// The keys of a request are cut into splits at fixed positions. A query computes each split for itself and merges them
// in order. Which other queries are computed in the same step, by which thread, and where the keys are in the cache
// changes nothing: a token gets the same bits in a prompt, in any chunk of it, and as a decode.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "linear.h"
#include "products.h"
#include "simd.h"
#include "threads.h"

namespace lightserve {
namespace {

constexpr int64_t SPLIT = 128;         // keys
constexpr int64_t SCORES = SPLIT + 8;  // floats of a query's row of scores: whole tiles may end behind the split
constexpr int64_t MAX_QUERIES = 96;    // of a tile, unless a single token has more
constexpr int64_t TILES_PER_THREAD = 4;  // of a prompt, at least, so that the last ones end together
constexpr int64_t MIN_TO_COPY = 16;    // queries for which values are copied first, so that they are neighbours
constexpr int64_t KEYS_AHEAD = 16;     // that are read into the caches: the CPU does not guess where the next rows are

struct KeyRange {
    int64_t begin, end;

    int64_t count() const { return end - begin; }
    int64_t first_split() const { return begin / SPLIT * SPLIT; }
    int64_t splits() const { return (end - first_split() + SPLIT - 1) / SPLIT; }
    KeyRange within(int64_t split) const { return {std::max(begin, split), std::min(end, split + SPLIT)}; }
};

// Neighbouring tokens of a request, and the query heads of a KV head: a query for each token and head, heads first.
struct QueryTile {
    int64_t request, kv_head;
    int64_t first, tokens;  // in the request's part of this step
};

// Some queries over some keys: the largest score, the sum of the weights, and the weighted values.
struct Partial {
    float* most;   // [queries]
    float* total;  // [queries]; 0: the query saw no key
    float* out;    // [queries, dim]

    static int64_t size(int64_t queries, int64_t dim) { return queries * (dim + 2); }
    static Partial at(float* memory, int64_t queries) { return {memory, memory + queries, memory + 2 * queries}; }
};

// Add the keys of `part` to those of `sum` for one query.
inline void merge_query(Partial sum, Partial part, int64_t query, int64_t dim) {
    float *to = sum.out + query * dim, *from = part.out + query * dim;
    if (part.total[query] == 0) return;
    if (sum.total[query] == 0) {
        sum.most[query] = part.most[query];
        sum.total[query] = part.total[query];
        std::copy(from, from + dim, to);
        return;
    }
    float most = std::max(sum.most[query], part.most[query]);
    float old_weight = std::exp(sum.most[query] - most), weight = std::exp(part.most[query] - most);
    sum.most[query] = most;
    sum.total[query] = sum.total[query] * old_weight + part.total[query] * weight;
    for (int64_t d = 0; d < dim; d += 8) store(to + d, fma(load(from + d), weight, scale_by(load(to + d), old_weight)));
}

inline void merge(Partial sum, Partial part, int64_t queries, int64_t dim) {
    for (int64_t query = 0; query < queries; query++) merge_query(sum, part, query, dim);
}

// The scores of a query in one split. Those from `begin` to `end` are of keys that it sees.
struct ScoreRow {
    float* scores;
    int64_t begin, end;

    int64_t first() const { return begin / 8 * 8; }  // whole vectors: the rest of the first and the last is padding
    int64_t last() const { return (end + 7) / 8 * 8; }

    void fill_padding(float value) const {
        std::fill(scores + first(), scores + begin, value);
        std::fill(scores + end, scores + last(), value);
    }

    // The products become scores; returns the factor that they still lack. `distance`: of the split's first key.
    float transform(const AttentionOptions& options, int64_t head, int64_t distance) const {
        static const float COUNT[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        if (options.softcap == 0 && options.alibi_slopes == nullptr) return options.scale;
        for (int64_t i = first(); i < end; i += 8) {
            F8 score = load(scores + i) * all(options.scale);
            if (options.softcap > 0) score = all(options.softcap) * tanh(score / all(options.softcap));
            if (options.alibi_slopes != nullptr) {
                F8 distances = load(COUNT) + all(static_cast<float>(distance + i));
                score = score + distances * all(options.alibi_slopes[head]);
            }
            store(scores + i, score);
        }
        return 1;
    }

    // e^(scale * score - the largest of them), and 0 as padding; returns that largest.
    float exponentiate(float scale, float& total) const {
        fill_padding(-INFINITY);
        F8 most = all(-INFINITY), sums = all(0);
        for (int64_t i = first(); i < end; i += 8) most = max(most, load(scores + i));
        float largest = scale * max_of(most);
        for (int64_t i = first(); i < end; i += 8) {
            F8 weight = exp(fma(load(scores + i), scale, all(-largest)));
            store(scores + i, weight);
            sums = sums + weight;
        }
        fill_padding(0);
        total = sum(sums);
        return largest;
    }
};

// The products of queries with the keys in N rows.
struct ScoreTile {
    const float* const* queries;
    const float* const (&keys)[N];
    int64_t dim;
    float* scores;

    template <int M>
    void run(int64_t query) const {
        const float* own[M];
        LS_UNROLL
        for (int m = 0; m < M; m++) own[m] = queries[query + m];
        Sums<M> sums;
        clear<M>(sums);
        add_products<M>(own, keys, dim, sums);
        LS_UNROLL
        for (int m = 0; m < M; m++) store_row_sums<M>(scores + (query + m) * SCORES, sums, m);
    }
};

// The weights of queries times values, key by key.
struct WeighTile {
    const float* weights;         // [queries, SCORES]
    const float* const* values;  // a row of `dim` for each key
    int64_t keys, dim;
    float* out;  // [queries, dim]

    template <int M>
    void run(int64_t query) const {
        constexpr int C = M == 1 ? 4 : 2;
        int64_t column = 0;
        for (; column + 8 * C <= dim; column += 8 * C) run<M, C>(query, column);
        for (; column < dim; column += 8) run<M, 1>(query, column);
    }

    template <int M, int C>
    void run(int64_t query, int64_t column) const {  // 8 * C columns
        F8 sums[M][C];
        LS_UNROLL
        for (int m = 0; m < M; m++) {
            LS_UNROLL
            for (int c = 0; c < C; c++) sums[m][c] = all(0);
        }
        const float* own = weights + query * SCORES;
        for (int64_t i = 0; i < keys; i++) {
            const float* value = values[i] + column;
            F8 columns[C];
            LS_UNROLL
            for (int c = 0; c < C; c++) columns[c] = load(value + 8 * c);
            LS_UNROLL
            for (int m = 0; m < M; m++) {
                LS_UNROLL
                for (int c = 0; c < C; c++) sums[m][c] = fma(columns[c], own[m * SCORES + i], sums[m][c]);
            }
        }
        LS_UNROLL
        for (int m = 0; m < M; m++) {
            LS_UNROLL
            for (int c = 0; c < C; c++) store(out + (query + m) * dim + column + 8 * c, sums[m][c]);
        }
    }
};

struct Attention {
    Heads q;
    Cache cache;
    const AttentionBatch& batch;
    const AttentionOptions& options;
    float* out;
    int64_t heads = q.count / cache.kv_heads;  // query heads of a KV head

    void run() const {
        std::vector<Item> items;
        int64_t num_parts = 0;
        for (int64_t request = 0; request < batch.count; request++) add_items(request, items, num_parts);
        int64_t size = Partial::size(max_tokens() * heads, cache.dim), count = static_cast<int64_t>(items.size());
        std::vector<float> parts(size * num_parts);
        int64_t products = count == 0 ? 1 : 2 * queries_of(items[0].tile) * cache.dim * items[0].keys.count();
        parallel_for(count, std::max<int64_t>(1, GRAIN / 4 / products), [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) compute(items[i], parts.data() + items[i].part * size);
        });
        for (const Item& item : items) {
            if (is_part(item)) merge_part(item, parts.data(), size);
        }
    }

private:
    struct Item {  // splits of a tile that are computed one after the other
        QueryTile tile;
        KeyRange keys;
        int64_t part = -1, first_part = -1;  // numbers of the results to merge; -1: the item has all splits of the tile
    };

    static bool is_part(const Item& item) { return item.part >= 0; }
    int64_t max_tokens() const { return std::max<int64_t>(1, MAX_QUERIES / heads); }  // of a tile
    int64_t queries_of(const QueryTile& tile) const { return tile.tokens * heads; }

    int64_t position(const QueryTile& tile, int64_t token) const {
        return batch.b_ready_cache_len[tile.request] + tile.first + token;
    }

    KeyRange keys_seen_from(int64_t request, int64_t position) const {
        int64_t window = options.window > 0 ? options.window : INT32_MAX;
        int64_t end = options.causal ? position + 1 : std::min<int64_t>(batch.b_seq_len[request], position + window);
        return {std::max<int64_t>(position - window + 1, 0), end};
    }

    KeyRange keys_seen_by(const QueryTile& tile) const {
        return {keys_seen_from(tile.request, position(tile, 0)).begin,
                keys_seen_from(tile.request, position(tile, tile.tokens - 1)).end};
    }

    // An item for each tile, those with many keys first. If there is one tile alone, an item for each split.
    void add_items(int64_t request, std::vector<Item>& items, int64_t& num_parts) const {
        int64_t tokens = batch.b_seq_len[request] - batch.b_ready_cache_len[request];
        int64_t items_wanted = num_threads() > 1 ? TILES_PER_THREAD * num_threads() : 1;
        int64_t at_once = std::clamp<int64_t>(tokens * cache.kv_heads / items_wanted, 1, max_tokens());
        int64_t tiles = (tokens + at_once - 1) / at_once;
        if (tiles == 1) return add_parts({request, 0, 0, tokens}, items, num_parts);
        for (int64_t kv_head = 0; kv_head < cache.kv_heads; kv_head++) {
            for (int64_t i = tiles - 1; i >= 0; i--) {
                int64_t first = i * at_once;
                QueryTile tile{request, kv_head, first, std::min(at_once, tokens - first)};
                items.push_back({tile, keys_seen_by(tile)});
            }
        }
    }

    // The KV heads of a split follow each other, since they are neighbours in the cache.
    void add_parts(QueryTile tile, std::vector<Item>& items, int64_t& num_parts) const {
        KeyRange keys = keys_seen_by(tile);
        int64_t splits = keys.splits();
        for (int64_t i = 0; i < splits; i++) {
            KeyRange own = keys.within(keys.first_split() + i * SPLIT);
            for (tile.kv_head = 0; tile.kv_head < cache.kv_heads; tile.kv_head++) {
                int64_t first_part = num_parts + tile.kv_head * splits;
                items.push_back(splits == 1 ? Item{tile, keys} : Item{tile, own, first_part + i, first_part});
            }
        }
        num_parts += splits == 1 ? 0 : splits * cache.kv_heads;
    }

    void compute(const Item& item, float* part) const {
        thread_local std::vector<float> memory;
        int64_t queries = queries_of(item.tile), size = Partial::size(queries, cache.dim);
        memory.resize(2 * size);
        Partial sum = Partial::at(is_part(item) ? part : memory.data(), queries);
        Partial of_split = Partial::at(memory.data() + size, queries);
        std::fill(sum.total, sum.total + queries, 0.0f);
        thread_local std::vector<const float*> query_rows;
        thread_local std::vector<float> copies;
        query_rows.resize(queries);
        find_queries(item.tile, query_rows.data());
        if (queries >= MIN_TO_COPY) copy_rows(queries, query_rows.data(), copies);
        for (int64_t split = item.keys.first_split(); split < item.keys.end; split += SPLIT) {
            attend(item.tile, query_rows.data(), split, item.keys.within(split), of_split);
            merge(sum, of_split, queries, cache.dim);
        }
        if (!is_part(item)) write(item.tile, sum);
    }

    void merge_part(const Item& item, float* parts, int64_t size) const {
        int64_t queries = queries_of(item.tile);
        Partial sum = Partial::at(parts + item.first_part * size, queries);
        if (item.part > item.first_part) merge(sum, Partial::at(parts + item.part * size, queries), queries, cache.dim);
        if (item.keys.end == keys_seen_by(item.tile).end) write(item.tile, sum);
    }

    // The queries of a tile over keys of one split.
    void attend(const QueryTile& tile, const float* const* query_rows, int64_t split, KeyRange keys, Partial to) const {
        thread_local std::vector<float> memory, copies;
        int64_t queries = queries_of(tile);
        memory.resize(queries * SCORES);
        float *all_scores = memory.data(), *scores = all_scores + keys.begin - split;  // of the first key
        const float* rows[SPLIT];
        find_keys(tile, keys, rows);
        multiply(queries, query_rows, rows, keys.count(), values_after_keys(), scores);
        for (int64_t query = 0; query < queries; query++)
            make_weights(tile, query, split, keys, all_scores + query * SCORES, to);
        for (int64_t i = 0; i < keys.count(); i++) rows[i] += values_after_keys();
        if (queries >= MIN_TO_COPY) copy_rows(keys.count(), rows, copies);
        in_tiles(0, queries, WeighTile{scores, rows, keys.count(), cache.dim, to.out});
    }

    int64_t values_after_keys() const { return cache.kv_heads * cache.dim; }

    void find_keys(const QueryTile& tile, KeyRange keys, const float** rows) const {
        const int32_t* slots = batch.req_to_token + batch.b_req_idx[tile.request] * batch.stride + keys.begin;
        const float* data = cache.data + tile.kv_head * cache.dim;
        for (int64_t i = 0; i < keys.count(); i++) rows[i] = data + slots[i] * cache.stride;
    }

    void copy_rows(int64_t count, const float** rows, std::vector<float>& copies) const {
        copies.resize(count * cache.dim);
        for (int64_t i = 0; i < count; i++) {
            float* to = copies.data() + i * cache.dim;
            std::copy(rows[i], rows[i] + cache.dim, to);
            rows[i] = to;
        }
    }

    // Meanwhile keys further on are read, and the values that `values` floats after each key.
    void multiply(int64_t queries, const float* const* query_rows, const float* const* keys, int64_t count,
                  int64_t values, float* scores) const {
        for (int64_t i = 0; i < std::min(KEYS_AHEAD, count); i++) prefetch(keys[i]);
        for (int64_t i = 0; i < count; i += N) {
            const float* some[N];
            for (int n = 0; n < N; n++) {
                some[n] = keys[std::min(i + n, count - 1)];
                prefetch(keys[std::min(i + n + KEYS_AHEAD, count - 1)]);
                prefetch(some[n] + values);
            }
            in_tiles(0, queries, ScoreTile{query_rows, some, cache.dim, scores + i});
        }
    }

    void prefetch(const float* row) const {
        for (int64_t i = 0; i < cache.dim; i += CACHE_LINE) __builtin_prefetch(row + i, 0, 2);
    }

    void find_queries(const QueryTile& tile, const float** rows) const {
        for (int64_t i = 0; i < queries_of(tile); i++)
            rows[i] = q.data + row_of(tile, i) * q.stride + head_of(tile, i) * cache.dim;
    }

    int64_t row_of(const QueryTile& tile, int64_t query) const {
        return batch.b_start_loc[tile.request] + tile.first + query / heads;
    }
    int64_t head_of(const QueryTile& tile, int64_t query) const { return tile.kv_head * heads + query % heads; }

    // Turn the scores of a query into weights. They are 0 for keys of `keys` that it does not see.
    void make_weights(const QueryTile& tile, int64_t query, int64_t split, KeyRange keys, float* scores,
                      Partial to) const {
        int64_t at = position(tile, query / heads);
        KeyRange seen = keys_seen_from(tile.request, at).within(split);
        to.total[query] = 0;
        if (seen.count() <= 0) return std::fill(scores + keys.begin - split, scores + keys.end - split, 0.0f);
        ScoreRow row{scores, seen.begin - split, seen.end - split};
        float scale = row.transform(options, head_of(tile, query), split - at);
        to.most[query] = row.exponentiate(scale, to.total[query]);
        std::fill(scores + keys.begin - split, scores + row.begin, 0.0f);
        std::fill(scores + row.end, scores + keys.end - split, 0.0f);
    }

    void write(const QueryTile& tile, Partial sum) const {
        for (int64_t query = 0; query < queries_of(tile); query++) {
            int64_t head = head_of(tile, query);
            float most = sum.most[query], total = sum.total[query], weight = 1;
            if (options.sinks != nullptr) {  // a key without a value
                float largest = std::max(most, options.sinks[head]);
                weight = std::exp(most - largest);
                total = total * weight + std::exp(options.sinks[head] - largest);
            }
            float* to = out + (row_of(tile, query) * q.count + head) * cache.dim;
            const float* from = sum.out + query * cache.dim;
            for (int64_t d = 0; d < cache.dim; d += 8) store(to + d, load(from + d) * all(weight) / all(total));
        }
    }
};

void attention(Heads q, Cache cache, const AttentionBatch& batch, const AttentionOptions& options, float* out) {
    Attention{q, cache, batch, options, out}.run();
}

}  // namespace
}  // namespace lightserve
