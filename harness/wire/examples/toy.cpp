// A worker in C++17, one file, standard library only: what a native engine needs to be judged by kv-harness.
//
//     g++ -std=c++17 -O2 -o toy toy.cpp
//     kv-harness wire-check ./toy && kv-harness run --target wire:./toy
//
// Put your engine behind `Toy`. The rest reads a line of JSON, writes a line of JSON, and may stay as it is.
// Built with -DOFFSET_MASK it has the bug that the harness was made for.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

// ---- JSON, as much of it as requests need -------------------------------------------------------------------------

struct Value {
    enum Kind { Null, Bool, Number, Text, List, Object } kind = Null;
    bool truth = false;
    double number = 0;
    std::string text;
    std::vector<Value> list;
    std::map<std::string, Value> object;

    bool has(const std::string& name) const { return object.count(name) > 0; }
    const Value& at(const std::string& name) const {
        auto found = object.find(name);
        if (found == object.end()) throw std::invalid_argument("the field " + name + " is missing");
        return found->second;
    }
    long whole() const {
        if (kind != Number || number != std::floor(number) || std::abs(number) > 1e15)
            throw std::invalid_argument("a whole number was expected");
        return static_cast<long>(number);
    }
};

class Reader {
  public:
    explicit Reader(const std::string& line) : text_(line) {}
    Value read() {
        Value value = any(0);
        skip();
        if (at_ != text_.size()) fail();
        return value;
    }

  private:
    const std::string& text_;
    size_t at_ = 0;

    [[noreturn]] void fail() const { throw std::invalid_argument("no JSON at byte " + std::to_string(at_)); }
    void skip() { while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_])) ++at_; }
    char peek() { skip(); if (at_ >= text_.size()) fail(); return text_[at_]; }
    bool eat(char letter) { if (peek() != letter) return false; ++at_; return true; }
    void need(char letter) { if (!eat(letter)) fail(); }
    bool word(const char* name) {
        if (text_.compare(at_, std::strlen(name), name) != 0) return false;
        at_ += std::strlen(name);
        return true;
    }

    Value any(int depth) {
        if (depth > 32) fail();
        Value value;
        const char first = peek();
        if (first == '{') {
            value.kind = Value::Object;
            need('{');
            if (eat('}')) return value;
            do {
                if (peek() != '"') fail();
                std::string name = string();
                need(':');
                value.object[name] = any(depth + 1);
            } while (eat(','));
            need('}');
        } else if (first == '[') {
            value.kind = Value::List;
            need('[');
            if (eat(']')) return value;
            do value.list.push_back(any(depth + 1)); while (eat(','));
            need(']');
        } else if (first == '"') {
            value.kind = Value::Text;
            value.text = string();
        } else if (word("true")) {
            value.kind = Value::Bool;
            value.truth = true;
        } else if (word("false")) {
            value.kind = Value::Bool;
        } else if (word("null")) {
        } else {
            char* end = nullptr;
            if (first != '-' && !std::isdigit(static_cast<unsigned char>(first))) fail();
            value.kind = Value::Number;
            value.number = std::strtod(text_.c_str() + at_, &end);
            at_ = static_cast<size_t>(end - text_.c_str());
        }
        return value;
    }

    std::string string() {  // requests hold names and base64: no escape but these
        std::string out;
        need('"');
        while (at_ < text_.size() && text_[at_] != '"') {
            char letter = text_[at_++];
            if (letter == '\\') {
                if (at_ >= text_.size() || !std::strchr("\"\\/", text_[at_])) fail();
                letter = text_[at_++];
            }
            out += letter;
        }
        if (at_ >= text_.size()) fail();
        ++at_;
        return out;
    }
};

// ---- Arrays: dtype, shape, and the bytes in base64, little-endian (as the machine has them, on x86 and ARM) ---------

std::string base64(const std::string& bytes) {
    static const char* letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (size_t i = 0; i < bytes.size(); i += 3) {
        uint32_t three = 0;
        for (size_t j = 0; j < 3; ++j)
            three = three << 8 | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0u);
        for (size_t j = 0; j < 4; ++j) out += i + j <= bytes.size() ? letters[three >> (18 - 6 * j) & 63] : '=';
    }
    return out;
}

template <class T>
std::string array(const char* dtype, const std::vector<size_t>& shape, const std::vector<T>& numbers) {
    std::string axes;
    for (size_t axis : shape) axes += (axes.empty() ? "" : ",") + std::to_string(axis);
    std::string bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T));
    return std::string("{\"dtype\":\"") + dtype + "\",\"shape\":[" + axes + "],\"data\":\"" + base64(bytes) + "\"}";
}

// ---- The engine: one attention layer, a cache that can be trimmed. Yours goes here. ----------------------------------

constexpr int VOCAB = 17, WIDTH = 4;
using Row = std::vector<double>;

Row embedding(long token, long position) {  // a token's id and its absolute position, as RoPE would have it
    Row row(WIDTH);
    for (int d = 0; d < WIDTH; ++d)
        row[d] = std::sin(double(token + 1) * (d + 1)) + 0.5 * std::cos(double(position) / (d + 1));
    return row;
}

double dot(const Row& a, const Row& b) {
    double sum = 0;
    for (int d = 0; d < WIDTH; ++d) sum += a[d] * b[d];
    return sum;
}

class Toy {
  public:
    explicit Toy(size_t sequences) : held_(sequences), offset_(sequences) {}

    // Each returns the fields of its answer.
    std::string forward(size_t sequence, const std::vector<long>& tokens) {
        auto& held = held_.at(sequence);
        const size_t start = offset_[sequence], before = held.size(), count = tokens.size();
        for (size_t i = 0; i < count; ++i) held.push_back(embedding(tokens[i], long(start + i)));
        offset_[sequence] += count;
#ifdef OFFSET_MASK
        const size_t width = start + count;
        if (count > 1 && width != held.size()) throw std::runtime_error("[broadcast_shapes] the mask is too wide");
#else
        const size_t width = before + count;
#endif
        std::vector<uint8_t> shown;
        std::vector<float> logits;
        for (size_t query = 0; query < count; ++query) {
            for (size_t key = 0; key < width; ++key) shown.push_back(key <= before + query);
            attend(held, before + query, logits);
        }
        std::vector<int64_t> positions;
        for (size_t i = 0; i < count; ++i) positions.push_back(int64_t(start + i));
        const std::string l = std::to_string(count), keys = std::to_string(held.size()), w = std::to_string(width);
        return "\"logits\":" + array("float32", {count, size_t(VOCAB)}, logits) +
               ",\"attention\":[{\"kind\":\"fast\",\"query_len\":" + l + ",\"key_len\":" + keys +
               ",\"value_len\":" + keys + ",\"heads\":1,\"kv_heads\":1,\"mask\":\"bool\",\"mask_shape\":[" + l + "," +
               w + "],\"shown\":" + array("bool", {1, 1, count, width}, shown) +
               "}],\"positions\":[{\"kind\":\"rope\",\"positions\":" + array("int64", {count}, positions) + "}]";
    }

    std::string trim_front(size_t sequence, size_t n, size_t keep) {
        auto& held = held_.at(sequence);
        n = std::min(n, held.size());
        keep = std::min(keep, held.size() - n);
        held.erase(held.begin() + long(keep), held.begin() + long(keep + n));
        return "\"removed\":[" + std::to_string(n) + "]";
    }

    std::string rollback(size_t sequence, size_t n) {
        auto& held = held_.at(sequence);
        n = std::min(n, held.size());
        held.resize(held.size() - n);
        offset_[sequence] -= n;
        return "\"removed\":[" + std::to_string(n) + "]";
    }

    std::string told() const {  // of every sequence, what each of its caches (here one) says of itself
        std::string all;
        for (size_t i = 0; i < held_.size(); ++i)
            all += std::string(i ? "," : "") + "{\"lengths\":[{\"offset\":" + std::to_string(offset_[i]) +
                   ",\"live_start\":" + std::to_string(offset_[i] - held_[i].size()) +
                   ",\"live_len\":" + std::to_string(held_[i].size()) + "}]}";
        return "\"told\":[" + all + "]";
    }

  private:
    std::vector<std::vector<Row>> held_;
    std::vector<size_t> offset_;

    static void attend(const std::vector<Row>& held, size_t query, std::vector<float>& logits) {
        Row out(WIDTH);
        double total = 0;
        for (size_t key = 0; key <= query; ++key) {
            const double score = std::exp(dot(held[query], held[key]));
            total += score;
            for (int d = 0; d < WIDTH; ++d) out[d] += score * held[key][d];
        }
        for (auto& each : out) each /= total;
        for (int token = 0; token < VOCAB; ++token) logits.push_back(float(dot(out, embedding(token, 0))));
    }
};

// ---- The protocol --------------------------------------------------------------------------------------------------

const char* HELLO =
    "\"protocol\":1,\"family\":\"toy-cpp\",\"vocab_size\":17,\"attention_layers\":[0],\"capabilities\":[\"front_trim\","
    "\"rollback\",\"sequences\",\"attention\",\"positions\",\"lengths\"]";

size_t count_of(const Value& request, const char* name) {
    const long value = request.at(name).whole();
    if (value < 0) throw std::invalid_argument(std::string(name) + " is negative");
    return size_t(value);
}

std::string answer(std::unique_ptr<Toy>& toy, const Value& request) {
    const std::string what = request.at("do").text;
    if (what == "hello") {
        if (request.at("protocol").whole() != 1) throw std::invalid_argument("this worker speaks version 1");
        return HELLO;
    }
    if (what == "open") {
        toy = std::make_unique<Toy>(request.at("owners").list.size());
        return "";
    }
    if (!toy) throw std::invalid_argument("no session is open");
    std::string said;
    if (what == "forward") {
        std::vector<long> tokens;
        for (const auto& token : request.at("tokens").list) tokens.push_back(token.whole());
        for (long token : tokens)
            if (token < 0 || token >= VOCAB) throw std::invalid_argument("no such token");
        said = toy->forward(count_of(request, "sequence"), tokens);
    } else if (what == "trim_front") {
        said = toy->trim_front(count_of(request, "sequence"), count_of(request, "n"), count_of(request, "keep"));
    } else if (what == "rollback") {
        said = toy->rollback(count_of(request, "sequence"), count_of(request, "n"));
    } else if (what != "tell") {
        throw std::invalid_argument("there is no such message");
    }
    const bool tells = what == "tell" || (request.has("tell") && request.at("tell").truth);
    return said + (tells ? (said.empty() ? "" : ",") + toy->told() : "");
}

int main() {
    std::unique_ptr<Toy> toy;
    for (std::string line; std::getline(std::cin, line);) {  // until the harness closes it, or is gone
        std::string id = "-1", said;
        try {
            const Value request = Reader(line).read();
            id = std::to_string(request.at("id").whole());
            said = answer(toy, request);
        } catch (const std::logic_error& error) {  // a bad request; what the engine throws is not caught: it aborts
            std::string why = error.what();
            std::replace_if(why.begin(), why.end(), [](char c) { return c == '"' || c == '\\' || c < ' '; }, '?');
            said = "\"bad_request\":\"" + why + "\"";
        }
        std::cout << "{\"id\":" << id << (said.empty() ? "" : ",") << said << "}" << std::endl;
    }
}
