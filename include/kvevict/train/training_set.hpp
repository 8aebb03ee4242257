// The contexts that a training draws from, by their lengths, with those that are set apart to measure on.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/core/splitmix64.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/train/recipe.hpp"
#include "kvevict/train/teacher.hpp"
#include "kvevict/train/teacher_file.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Contexts of all files by their lengths, and their teachers, made when first needed.
class TrainingSet {
 public:
  // limit: contexts of each length, 0: all. Throws std::invalid_argument where nothing is left to train on.
  TrainingSet(LkvTeacher& teacher, std::span<const Tasks> files, const LkvRecipe& recipe, TeacherFolder folder)
      : teacher_(&teacher), folder_(std::move(folder)), continuation_(recipe.continuation) {
    for (const Tasks& f : files) {
      f.check_vocabulary(teacher.config().vocabulary);
      for (index_t c = 0; c < f.contexts(); ++c) {
        auto& list = by_length_[static_cast<index_t>(f.context(c).size())];
        if (recipe.contexts == 0 || static_cast<index_t>(list.size()) < recipe.contexts + recipe.check_contexts)
          list.push_back({&f, c, nullptr});
      }
    }
    for (auto& [length, list] : by_length_) {
      const auto count = std::min<std::size_t>(static_cast<std::size_t>(recipe.check_contexts), list.size() / 4);
      auto& held = held_out_[length];
      held.insert(held.end(), std::make_move_iterator(list.end() - static_cast<std::ptrdiff_t>(count)),
                  std::make_move_iterator(list.end()));
      list.resize(list.size() - count);
      contexts_ += list.size();
    }
    if (contexts_ == 0) fail_argument("LKV training: the task files hold no contexts");
  }

  struct Entry {
    const Tasks* file = nullptr;
    index_t context = 0;
    std::unique_ptr<TeacherContext> teacher;
  };
  std::size_t contexts() const noexcept { return contexts_; }
  index_t longest() const noexcept { return by_length_.rbegin()->first; }
  std::map<index_t, std::vector<Entry>>& lengths() noexcept { return by_length_; }
  // Contexts that are held out for the hard loss, of the most frequent length; there may be none.
  std::vector<Entry>& held_out() noexcept {
    const auto frequent = std::max_element(by_length_.begin(), by_length_.end(), [](const auto& a, const auto& b) {
      return a.second.size() < b.second.size();
    });
    return held_out_[frequent->first];
  }
  const TeacherContext& teacher(const host_exec& exec, Entry& e) {
    if (!e.teacher)
      e.teacher = std::make_unique<TeacherContext>(folder_.context(exec, *teacher_, *e.file, e.context, continuation_));
    return *e.teacher;
  }
  // The list that holds the n-th context, counted over all lengths.
  std::vector<Entry>& list_of(std::size_t n) {
    for (auto& [length, list] : by_length_) {
      if (n < list.size()) return list;
      n -= list.size();
    }
    return by_length_.rbegin()->second;
  }
  // Differs where other files, or other contexts of them, would be trained on.
  std::string fingerprint() const {
    std::uint64_t hash = 0;
    for (const auto& [length, list] : by_length_)
      for (const Entry& e : list)
        for (const index_t t : e.file->context(e.context))
          hash = detail::splitmix64(hash ^ static_cast<std::uint64_t>(t));
    return std::to_string(contexts_) + " contexts " + std::to_string(hash);
  }

 private:
  LkvTeacher* teacher_;
  TeacherFolder folder_;
  index_t continuation_;
  std::map<index_t, std::vector<Entry>> by_length_, held_out_;
  std::size_t contexts_ = 0;
};

}  // namespace kvevict::inline KVEVICT_ABI
