// What the page says, in English and Chinese. A node keeps its key, so that another language can be put in at any time.

const WORDS = {
  skip: ["Skip to the content", "跳到正文"],
  nav: ["Views", "视图"],
  "tab.play": ["Playground", "试用"],
  "tab.models": ["Models", "模型"],
  "tab.traffic": ["Traffic", "流量"],
  language: ["Language", "语言"],
  close: ["Close", "关闭"],
  cancel: ["Cancel", "取消"],
  copy: ["Copy", "复制"],
  copied: ["Copied", "已复制"],
  about: ["Switchyard {0} · configuration {1} · Router {2}", "Switchyard {0} · 配置 {1} · 路由副本 {2}"],
  "link.connecting": ["Connecting…", "正在连接…"],
  "link.live": ["Live", "实时"],
  "link.lost": ["The server does not answer. Trying again…", "服务器没有响应，正在重试…"],
  "link.back": ["The server is back.", "服务器已恢复。"],
  "link.locked": ["A key is needed.", "需要密钥。"],
  "link.refused": ["The server refuses: {0} Trying again…", "服务器拒绝：{0} 正在重试…"],
  "link.retry": ["Try now", "立即重试"],
  "key.button": ["Key", "密钥"],
  "key.title": ["API key", "API 密钥"],
  "key.text": ["This service asks for a key. It stays in this browser tab and is forgotten with it.", "此服务需要密钥。密钥只保存在这个浏览器标签页中，关闭即忘。"],
  "key.label": ["Key", "密钥"],
  "key.use": ["Use it", "使用"],
  "key.forget": ["Forget it", "忘记密钥"],
  "error.network": ["The server does not answer", "服务器没有响应"],
  "error.request": ["The request is not right", "请求有误"],
  "error.401": ["The key is missing or not known", "缺少密钥，或密钥未知"],
  "error.403": ["This is not allowed", "不允许"],
  "error.404": ["There is no such thing", "不存在"],
  "error.429": ["Too many requests with this key", "此密钥的请求过多"],
  "error.503": ["The service has no room now, or the model is not ready", "服务暂时没有空位，或模型尚未就绪"],
  "error.other": ["The service failed", "服务出错"],
  "error.again": ["Try again in {0} s.", "请在 {0} 秒后重试。"],
  "error.json": ["{0}: this is not JSON", "{0}：不是合法的 JSON"],
  "error.array": ["{0}: this must be a list", "{0}：必须是列表"],
  "error.object": ["{0}: this must be an object", "{0}：必须是对象"],
  "error.range": ["{0}: from {1} to {2}", "{0}：须在 {1} 到 {2} 之间"],
  "error.cut": ["The answer ended before its end", "回答没有结束就中断了"],
  turns: ["Conversation", "对话"],
  prompt: ["Your message", "你的消息"],
  "prompt.hint": ["Enter sends, Shift+Enter begins a new line", "回车发送，Shift+回车换行"],
  send: ["Send", "发送"],
  stop: ["Stop", "停止"],
  compare: ["Compare thinking on and off", "对比思考开与关"],
  fresh: ["New conversation", "新对话"],
  code: ["As code", "代码"],
  settings: ["Settings", "设置"],
  model: ["Model", "模型"],
  "model.auto": ["auto (the router decides)", "auto（由路由决定）"],
  thinking: ["Thinking", "思考"],
  "thinking.auto": ["Auto", "自动"],
  "thinking.on": ["On", "开"],
  "thinking.off": ["Off", "关"],
  budget: ["Budget of thinking, tokens", "思考预算（token）"],
  "budget.none": ["no limit", "不限"],
  system: ["System prompt", "系统提示词"],
  temperature: ["Temperature", "温度"],
  max: ["Max tokens", "最多 token"],
  unset: ["default", "默认"],
  tools: ["Tools (JSON)", "工具（JSON）"],
  schema: ["JSON schema of the answer", "回答的 JSON schema"],
  empty: ["Ask something. Below each answer stands which model gave it, whether it thought first, and why.", "问点什么吧。每个回答旁边会说明由哪个模型回答、是否先思考，以及原因。"],
  you: ["You", "你"],
  "tool.result": ["Result of {0}", "{0} 的结果"],
  "tool.call": ["Calls {0}", "调用 {0}"],
  "tool.give": ["Give the results", "提交结果"],
  "side.on": ["Thinking on", "思考：开"],
  "side.off": ["Thinking off", "思考：关"],
  "side.keep": ["Go on with this one", "用这个继续"],
  "side.kept": ["The conversation goes on with this one", "对话将用这个回答继续"],
  "state.sending": ["Waiting for the first token…", "等待第一个 token…"],
  "state.loading": ["Loading: {0}", "正在加载：{0}"],
  "state.stopped": ["Stopped by you.", "已被你停止。"],
  "state.length": ["Cut at the maximum of tokens.", "达到最大 token 数，回答被截断。"],
  "state.done": ["The answer is complete.", "回答已完成。"],
  reasoning: ["Thinking", "思考"],
  "reasoning.size": ["Thinking · {0} tokens", "思考 · {0} 个 token"],
  why: ["Why", "原因"],
  "why.budget": ["Budget", "预算"],
  "why.rule": ["Rule", "规则"],
  "why.score": ["Score", "评分"],
  "why.fallback": ["Fallback", "退路"],
  "why.warning": ["Warning", "警告"],
  "why.degraded": ["Under load", "高负载"],
  "why.cold": ["Cold start", "冷启动"],
  "why.decision": ["Decision", "决策"],
  "why.ttft": ["First token", "首个 token"],
  "why.tps": ["Tokens/s", "token/秒"],
  "why.tokens": ["Tokens", "token 数"],
  "why.tokens.split": ["{0} prompt ({1} cached), {2} thinking, {3} answer", "提示 {0}（缓存 {1}），思考 {2}，回答 {3}"],
  "why.finish": ["End", "结束"],
  "why.steps": ["Steps", "步骤"],
  "why.request": ["Request", "请求"],
  "why.policy": ["Configuration", "配置"],
  on: ["on", "开"],
  off: ["off", "关"],
  tokens: ["{0} tokens", "{0} 个 token"],
  "source.explicit": ["you said so", "由你指定"],
  "source.sticky": ["as before in this conversation", "沿用此对话"],
  "source.rule": ["a rule", "规则"],
  "source.scorer": ["the scorer", "评分器"],
  "source.default": ["the default", "默认"],
  "source.alias": ["you said so", "由你指定"],
  "source.enable_thinking": ["you said so", "由你指定"],
  "source.thinking_token_budget": ["you said so", "由你指定"],
  "source.unsupported": ["it cannot", "不支持"],
  "source.constraint": ["nothing else fits", "只有它合适"],
  "tier.resident": ["always loaded", "常驻"],
  "tier.lazy": ["loaded on demand", "按需加载"],
  "tier.external": ["another server", "外部服务器"],
  "stage.hot": ["hot", "就绪"],
  "stage.awake": ["awake", "就绪"],
  "stage.loading": ["loading", "加载中"],
  "stage.waking": ["waking", "唤醒中"],
  "stage.asleep": ["asleep", "休眠"],
  "stage.falling_asleep": ["falling asleep", "正在休眠"],
  "stage.unloading": ["unloading", "卸载中"],
  "stage.stopped": ["stopped", "已停止"],
  "stage.failed": ["failed", "失败"],
  pinned: ["pinned", "已固定"],
  default: ["answers auto", "回答 auto"],
  thinks: ["can think", "可思考"],
  running: ["Running", "运行中"],
  waiting: ["Waiting", "等待"],
  queued: ["Queued", "排队"],
  used: ["Last used", "上次使用"],
  "used.ago": ["{0} ago", "{0}前"],
  "used.now": ["now", "现在"],
  "used.never": ["not yet", "尚未使用"],
  wake: ["Wake time", "唤醒时间"],
  context: ["Context", "上下文"],
  gpu: ["GPU memory", "GPU 内存"],
  ram: ["Memory", "内存"],
  host: ["Host memory", "主机内存"],
  memory: ["{0} of {1} GB", "{0} / {1} GB"],
  "memory.one": ["{0} GB", "{0} GB"],
  replica: ["{0} on {1}: {2}", "{0}，节点 {1}：{2}"],
  node: ["{0}: {1} of {2} GPUs", "{0}：{2} 个 GPU，已用 {1}"],
  "node.none": ["{0}: no GPU", "{0}：没有 GPU"],
  pool: ["Pool of the models loaded on demand", "按需加载模型的资源池"],
  "order.load": ["Load", "加载"],
  "order.sleep": ["Sleep", "休眠"],
  "order.unload": ["Unload", "卸载"],
  "order.pin": ["Pin", "固定"],
  "order.unpin": ["Unpin", "取消固定"],
  "order.of": ["{0}: {1}", "{1}：{0}"],
  "order.done": ["{0} has been told: {1}.", "已通知 {0}：{1}。"],
  "sure.unload": ["Unload {0}? {1} requests run on it and are finished first. The next one waits for a load.", "卸载 {0}？有 {1} 个请求正在运行，会先完成。下一个请求须等待加载。"],
  "sure.sleep": ["Put {0} to sleep? {1} requests run on it and are finished first.", "让 {0} 休眠？有 {1} 个请求正在运行，会先完成。"],
  "models.none": ["No model is known yet.", "还没有已知的模型。"],
  "traffic.title": ["The last 15 minutes", "最近 15 分钟"],
  "chart.requests": ["Requests/s", "请求/秒"],
  "chart.ttft": ["Time to first token, ms", "首个 token 时间，毫秒"],
  "chart.tpot": ["Time per output token, ms", "每个输出 token 时间，毫秒"],
  "chart.tokens": ["Tokens/s", "token/秒"],
  "chart.thinking": ["Thinking, % of answers", "思考的回答，%"],
  "chart.failed": ["Failed/s", "失败/秒"],
  "chart.refused": ["Refused, by reason", "被拒绝（按原因）"],
  "chart.sources": ["Decided by", "决策来源"],
  "chart.none": ["None", "没有"],
  "chart.label": ["{0}: now {1}, highest {2}", "{0}：现在 {1}，最高 {2}"],
  "requests.title": ["Latest requests", "最新请求"],
  "requests.note": ["From the audit, without any text. Open one to see where its time went.", "来自审计记录，不含任何文本。展开可看时间花在哪里。"],
  "requests.none": ["None yet.", "还没有。"],
  "step.admit": ["admit", "准入"],
  "step.decide": ["decide", "决策"],
  "step.hold": ["hold (the model loads)", "等待模型加载"],
  "step.queue": ["queue", "排队"],
  "step.relay": ["at the engine", "在引擎中"],
  "step.engine": ["to the first token", "到首个 token"],
  "step.answer": ["to the end", "到结束"],
  timeline: ["Where the time went", "时间花在哪里"],
};
const ATTRIBUTES = ["aria-label", "placeholder"];
const LANGUAGES = ["en", "zh"];
let now = "en";

export const language = () => now;

export function word(key, ...args) {
  const text = WORDS[key]?.[LANGUAGES.indexOf(now)] ?? key;
  return text.replace(/\{(\d)\}/g, (_, place) => args[place] ?? "");
}

// The word for `prefix.name`, or the name itself where the service has a newer one.
export const named = (prefix, name) => (`${prefix}.${name}` in WORDS ? word(`${prefix}.${name}`) : name);

// An argument that begins with "@" is a key itself and changes its language, too.
const said = (key, args) => word(key, ...args.map((arg) => (arg?.[0] === "@" && arg.slice(1) in WORDS ? word(arg.slice(1)) : arg)));

export function say(node, key, ...args) {
  const given = JSON.stringify(args);
  if (node.dataset.t === key && node.dataset.args === given) return node;
  node.dataset.t = key;
  node.dataset.args = given;
  node.textContent = said(key, args);
  return node;
}

// A text that is the same in all languages.
export function write(node, text) {
  delete node.dataset.t;
  if (node.textContent !== text) node.textContent = text;
  return node;
}

export function sayIn(node, attribute, key, ...args) {
  node.setAttribute(`data-t-${attribute}`, key);
  node.setAttribute(`data-args-${attribute}`, JSON.stringify(args));
  node.setAttribute(attribute, said(key, args));
  return node;
}

export function speak(chosen) {
  now = LANGUAGES.includes(chosen) ? chosen : "en";
  document.documentElement.lang = now === "zh" ? "zh-CN" : "en";
  for (const node of document.querySelectorAll("[data-t]")) {
    node.textContent = said(node.dataset.t, JSON.parse(node.dataset.args || "[]"));
  }
  for (const attribute of ATTRIBUTES) {
    for (const node of document.querySelectorAll(`[data-t-${attribute}]`)) {
      const args = JSON.parse(node.getAttribute(`data-args-${attribute}`) || "[]");
      node.setAttribute(attribute, said(node.getAttribute(`data-t-${attribute}`), args));
    }
  }
}

export const preferred = () => (navigator.languages?.[0] ?? navigator.language ?? "en").startsWith("zh") ? "zh" : "en";

export const number = (value, digits = 0) =>
  new Intl.NumberFormat(now === "zh" ? "zh-CN" : "en", { maximumFractionDigits: digits }).format(value);

// A duration in ms, as a person reads it.
export function duration(ms) {
  if (ms >= 60_000) return `${number(ms / 60_000, 1)} min`;
  if (ms >= 1000) return `${number(ms / 1000, 1)} s`;
  return `${number(ms, ms < 10 ? 1 : 0)} ms`;
}
